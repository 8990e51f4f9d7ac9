// The cell of an LSTM: torch asks devices for a fused one, which the CPU does not have. Here it is several kernels.
#pragma once

#include "tensors.h"

#include <ATen/Functions.h>

namespace late {

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  at::Tensor gates = at::add(of_input, of_hidden);
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) gates = at::add(gates, *bias);
  const auto parts = gates.chunk(4, 1);
  const at::Tensor input = parts[0].sigmoid(), forget = parts[1].sigmoid(), made = parts[2].tanh(), output = parts[3].sigmoid();
  const at::Tensor next = at::add(at::mul(forget, cell), at::mul(input, made));
  return {at::mul(output, next.tanh()), next, at::cat({input, forget, made, output}, 1)};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& of_output,
    const std::optional<at::Tensor>& of_next, const at::Tensor& cell, const at::Tensor& next, const at::Tensor& kept, bool has_bias) {
  const auto parts = kept.chunk(4, 1);
  const at::Tensor &input = parts[0], &forget = parts[1], &made = parts[2], &output = parts[3];
  const at::Tensor shown = next.tanh(), none = at::zeros_like(next);
  const at::Tensor of_hidden = of_output && of_output->defined() ? *of_output : none;
  auto slope = [](const at::Tensor& sigmoid) { return at::mul(sigmoid, at::rsub(sigmoid, 1)); };
  auto slope_of_tanh = [](const at::Tensor& tanh) { return at::rsub(at::mul(tanh, tanh), 1); };
  const at::Tensor of_cell = at::add(
      at::mul(at::mul(of_hidden, output), slope_of_tanh(shown)), of_next && of_next->defined() ? *of_next : none);
  const at::Tensor gates = at::cat(
      {at::mul(at::mul(of_cell, made), slope(input)), at::mul(at::mul(of_cell, cell), slope(forget)),
       at::mul(at::mul(of_cell, input), slope_of_tanh(made)), at::mul(at::mul(of_hidden, shown), slope(output))},
      1);
  return {gates, at::mul(of_cell, forget), has_bias ? gates.sum(0) : at::Tensor()};
}

} // namespace late
