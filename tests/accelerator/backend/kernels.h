// Kernels: those of the CPU, put into the queue of a stream. The meta kernel states what will come out.
#pragma once

#include "tensors.h"

#include <ATen/Functions.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace late {

using Values = std::vector<at::IValue>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

inline at::IValue map_tensors(const at::IValue& value, const Change& change) {
  auto one = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(one(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor ? std::optional<at::Tensor>(one(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

// A number of Python that became a tensor stays one for the rules of types.
inline at::Tensor like_number(at::Tensor made, const at::Tensor& of) {
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

inline bool is_tensor_type(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::TensorType ||
      (type->kind() == c10::TypeKind::ListType && type->expect<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType);
}
inline bool takes_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// What kernels of devices take and those of the CPU do not.
inline void adapt_to_cpu(const std::string& name, torch::jit::Stack& stack) {
  if (name == "aten::histc" && !stack[0].toTensor().is_floating_point()) stack[0] = stack[0].toTensor().to(at::kDouble);
  if (name == "aten::native_layer_norm_backward") {  // devices keep the mean and the deviation in float32
    const at::Tensor& weight = stack[5].isTensor() ? stack[5].toTensor() : stack[1].toTensor();
    for (size_t i : {3, 4}) stack[i] = stack[i].toTensor().to(weight.scalar_type());
  }
}

// One call of an operator, with what it was given.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const std::string& name;
  Values given;
  int device = -1;

  Call(const c10::OperatorHandle& op_, const torch::jit::Stack& stack)
      : op(op_), schema(op_.schema()), name(schema.name()), given(stack.end() - static_cast<long>(schema.arguments().size()), stack.end()) {
    // As with CUDA, an index may be on the CPU, and so may a number.
    const bool takes_indices = name.find("index") != std::string::npos;
    for (const auto& value : given)
      map_tensors(value, [&](const at::Tensor& tensor) {
        if (is_ours(tensor) && device < 0) device = tensor.device().index();
        return tensor;
      });
    for (const auto& value : given)
      map_tensors(value, [&](const at::Tensor& tensor) {
        const bool stays = is_ours(tensor) ? tensor.device().index() == device : takes_indices;
        TORCH_CHECK(stays || tensor.dim() == 0 || device < 0, "Expected all tensors to be on the same device, found late:", device,
            " and ", tensor.device(), " in ", name, ".");
        return tensor;
      });
    for (const auto& value : given)
      if (device < 0 && value.isDevice()) device = value.toDevice().index();
    if (device < 0) device = current;
    check_not_lost(device);
  }

  bool is_out(size_t i) const { return schema.arguments()[i].is_out() && given[i].isTensor() && is_ours(given[i].toTensor()); }
  bool is_written(size_t i) const {
    const auto* alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite() && given[i].isTensor() && is_ours(given[i].toTensor());
  }
  // The argument that a result is, or null.
  const at::IValue* argument_of(size_t result) const {
    const auto* alias = schema.returns()[result].alias_info();
    if (!alias) return nullptr;
    for (size_t i = 0; i < given.size(); i++) {
      const auto* other = schema.arguments()[i].alias_info();
      if (!other || other->beforeSets() != alias->beforeSets()) continue;
      TORCH_CHECK(alias->isWrite(), name, " makes a view: late needs a kernel for it.");
      return &given[i];
    }
    return nullptr;
  }

  // Every tensor changed, the same one always to the same; devices and generators replaced.
  Values with(const Change& change, Device replaced, const std::function<at::IValue(const at::IValue&)>& generator) const {
    std::unordered_map<c10::TensorImpl*, at::Tensor> seen;
    auto once = [&](const at::Tensor& tensor) {
      auto& made = seen[tensor.unsafeGetTensorImpl()];
      if (!made.defined()) made = like_number(change(tensor), tensor);
      return made;
    };
    Values values;
    for (size_t i = 0; i < given.size(); i++)
      values.push_back(takes_generator(schema.arguments()[i]) ? generator(given[i])
                       : given[i].isDevice()                  ? at::IValue(replaced)
                                                              : map_tensors(given[i], once));
    return values;
  }

  // What comes out, as meta tensors, and the new shapes of arguments that are written to; nothing if torch has no meta kernel.
  struct Shapes {
    Values results;
    std::vector<std::pair<size_t, at::Tensor>> written;
  };
  std::optional<Shapes> run_meta() const {
    for (const auto& result : schema.returns())
      if (!is_tensor_type(result.type())) return std::nullopt;
    Values metas = with(
        [&](const at::Tensor& tensor) {
          return !is_ours(tensor) && !tensor.dim()
              ? tensor  // a number
              : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
        },
        Device(at::kMeta), [](const at::IValue&) { return at::IValue(); });
    for (size_t i = 0; i < given.size(); i++)
      if (is_out(i)) metas[i] = at::empty({0}, given[i].toTensor().options().device(at::kMeta));
    torch::jit::Stack stack = metas;
    try {
      OnlyKernels only;
      op.callBoxed(&stack);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    Shapes shapes{{stack.begin(), stack.end()}, {}};
    for (size_t i = 0; i < given.size(); i++)
      if (is_written(i)) shapes.written.emplace_back(i, metas[i].toTensor());
    return shapes;
  }

  // Many meta kernels are in Python and take longer than the kernel: each answer is kept.
  const std::optional<Shapes>& shapes() const {
    std::ostringstream key;
    key << schema.operator_name();
    for (const auto& value : given) {
      key << '|';
      if (value.isGenerator() || value.isDevice()) continue;
      bool has_tensors = value.isTensor();
      map_tensors(value, [&](const at::Tensor& tensor) {
        has_tensors = true;
        key << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.device() << tensor.unsafeGetTensorImpl()->is_wrapped_number();
        return tensor;
      });
      if (value.isOptionalTensorList())
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) key << (tensor && tensor->defined() ? '+' : '-');
      else if (!has_tensors) key << value;
    }
    static std::mutex mutex;  // never held while something is computed
    static auto* known = new std::unordered_map<std::string, std::unique_ptr<const std::optional<Shapes>>>;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (auto found = known->find(key.str()); found != known->end()) return *found->second;
    }
    auto found = std::make_unique<const std::optional<Shapes>>(run_meta());
    std::lock_guard<std::mutex> lock(mutex);
    return *known->try_emplace(key.str(), std::move(found)).first->second;
  }

  void resize_written(const Shapes& shapes) const {
    for (const auto& [i, meta] : shapes.written) {
      const at::Tensor& target = given[i].toTensor();
      if (target.sizes() == meta.sizes()) continue;
      target.resize_(meta.sizes());
      target.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    }
  }

  // The same draws as on the CPU with a generator in this state. Which draws follow is found by a rehearsal on tensors
  // of ones, since the kernel itself runs later.
  at::IValue generator_of_kernel(const at::IValue& value) const {
    at::Generator theirs = value.isNone() ? default_generator(static_cast<DeviceIndex>(device)) : value.toGenerator();
    TORCH_CHECK(theirs.device().type() == KIND, "Expected a generator of late, found one of ", theirs.device(), ".");
    static std::mutex drawing;  // one rehearsal at a time; the mutex of the generator is held by threads that have the interpreter
    std::lock_guard<std::mutex> turn(drawing);
    auto locked = [&] { return std::lock_guard<std::mutex>(theirs.mutex()); };
    auto clone = [&] {
      auto lock = locked();
      return theirs.clone();
    };
    at::Generator kernel = clone(), after = clone();
    torch::jit::Stack rehearsal = with(
        [](const at::Tensor& tensor) {
          return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false)).fill_(1);
        },
        Device(at::kCPU), [&](const at::IValue&) { return at::IValue(after); });
    auto* state = static_cast<at::CPUGeneratorImpl*>(theirs.unsafeGetGeneratorImpl());
    try {
      OnlyKernels only;
      if (!settings.dry) op.callBoxed(&rehearsal);
    } catch (const std::exception&) {  // ones are no possible values for it: a seed of its own
      auto lock = locked();
      return at::make_generator<at::CPUGeneratorImpl>(state->random64());
    }
    auto* there = static_cast<at::CPUGeneratorImpl*>(after.unsafeGetGeneratorImpl());
    auto lock = locked();
    state->set_engine(there->engine());
    state->set_next_float_normal_sample(there->next_float_normal_sample());
    state->set_next_double_normal_sample(there->next_double_normal_sample());
    return kernel;
  }

  // Memory of the CPU that the caller may change after the launch is copied now.
  Values for_kernel() const {
    return with(
        [](const at::Tensor& tensor) { return is_ours(tensor) ? raw(tensor) : settings.dry ? tensor : tensor.clone(); },
        Device(at::kCPU), [&](const at::IValue& value) { return generator_of_kernel(value); });
  }

  // For a dry run: by bytes, and for products of matrices by operations.
  double seconds(const Values& results) const {
    double bytes = 0, operations = 0, largest = 0;
    auto add = [&](const at::Tensor& tensor) {
      bytes += bytes_of(tensor);
      return tensor;
    };
    for (const auto& value : given) map_tensors(value, add);
    for (const auto& value : results)
      map_tensors(value, [&](const at::Tensor& tensor) {
        largest = std::max(largest, static_cast<double>(tensor.numel()));
        return add(tensor);
      });
    if (name.find("mm") != std::string::npos) {
      const at::Tensor& matrix = given[name.find("add") == std::string::npos ? 0 : 1].toTensor();
      operations = 2 * largest * static_cast<double>(matrix.size(-1));
      // of two matrices, cut into groups along what is summed: each group has a share of it
      if (name.find("grouped") != std::string::npos && matrix.dim() == 2 && results[0].toTensor().dim() == 3)
        operations /= static_cast<double>(results[0].toTensor().size(0));
    }
    return std::max(bytes / settings.costs.memory, operations / settings.costs.flops);
  }

  // Some kernels use the tensor for their output in between, with another shape.
  at::Tensor for_output(size_t i) const { return at::empty({0}, given[i].toTensor().options().device(at::kCPU)); }

  at::Tensor on_device(const at::Tensor& like) const {
    return at::empty_strided(like.sizes(), like.strides(), like.options().device(Device(KIND, static_cast<DeviceIndex>(device))));
  }

  // Put the kernel into the queue and return what it will have written.
  Values launch(const Values& metas) const {
    Values results;
    std::vector<std::vector<at::Tensor>> targets(metas.size());
    for (size_t i = 0; i < metas.size(); i++) {
      if (const auto* argument = argument_of(i)) {
        results.push_back(*argument);
        continue;
      }
      results.push_back(map_tensors(metas[i], [&](const at::Tensor& meta) {
        at::Tensor made = on_device(meta);
        targets[i].push_back(raw(made));
        return made;
      }));
    }
    count("kernels");
    Values values = for_kernel();
    std::vector<std::pair<size_t, at::Tensor>> outputs;
    for (size_t i = 0; i < given.size(); i++)
      if (is_out(i)) {
        outputs.emplace_back(i, values[i].toTensor());
        values[i] = for_output(i);
      }
    auto run = [op = op, values, outputs, targets] {
      OnlyKernels only;
      torch::jit::Stack stack = values;
      adapt_to_cpu(op.schema().name(), stack);
      op.callBoxed(&stack);
      for (const auto& [i, to] : outputs) to.copy_(values[i].toTensor());
      for (size_t i = 0; i < targets.size(); i++) {
        size_t number = 0;
        if (!targets[i].empty())
          map_tensors(stack[i], [&](const at::Tensor& tensor) {
            const at::Tensor& target = targets[i].at(number++);
            if (tensor.numel()) target.copy_(tensor);  // a batch norm in eval has no statistics to save
            return target;
          });
      }
    };
    enqueue(here(device), {run, schema.name().c_str(), seconds(results)});
    return results;
  }

  // Wait for the stream and run the kernel now: only it knows the shape of what comes out, or it returns no tensor.
  Values run_now() const {
    Stream& stream = here(device);
    synchronize(stream, name.c_str());
    torch::jit::Stack stack = for_kernel();
    for (size_t i = 0; i < given.size(); i++)
      if (is_out(i)) stack[i] = for_output(i);
    const Values arguments = stack;
    if (settings.dry) {
      TORCH_CHECK(name == "aten::_local_scalar_dense", "A dry run cannot know what ", name, " returns.");
      return {at::Scalar(1)};
    }
    {
      OnlyKernels only;
      op.callBoxed(&stack);
    }
    auto write = [&](const at::Tensor& to, const at::Tensor& from) {
      if (to.numel()) enqueue_copy(stream, name.c_str(), raw(to), from, 0, -1);
      return to;
    };
    for (size_t i = 0; i < given.size(); i++)
      if (is_out(i)) {
        given[i].toTensor().resize_(arguments[i].toTensor().sizes());
        write(given[i].toTensor(), arguments[i].toTensor());
      }
    Values results;
    for (size_t i = 0; i < stack.size(); i++) {
      const auto* argument = argument_of(i);
      results.push_back(argument ? *argument : map_tensors(stack[i], [&](const at::Tensor& tensor) { return write(on_device(tensor), tensor); }));
    }
    return results;
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  InBackend timed;
  Call call(op, *stack);
  c10::DeviceGuard guard(Device(KIND, static_cast<DeviceIndex>(call.device)));
  const auto& shapes = call.shapes();
  if (shapes) call.resize_written(*shapes);
  Values results = shapes ? call.launch(shapes->results) : call.run_now();
  torch::jit::drop(*stack, call.given.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// -- kernels that the CPU does not have ----------------------------------------------------------------------------------

inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  at::Tensor keep = at::empty_like(input).bernoulli_(1 - p);
  return {at::mul(input, keep.div(1 - p)), keep.to(at::kBool)};
}

// Attention is one kernel where the CPU has one, and always in a dry run; only the formula has a gradient of the mask.
inline int64_t sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  auto fused = [&] {
    if (mask && mask->requires_grad()) return false;
    OnlyKernels only;
    const auto of_cpu = at::_fused_sdp_choice(
        raw(query), raw(key), raw(value), mask ? std::optional<at::Tensor>(raw(*mask)) : std::nullopt, dropout, causal, scale, grouped);
    return of_cpu == static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  };
  return static_cast<int64_t>(settings.dry || fused() ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

// Attention of a dry run, in one kernel: two products forward and five backward, half of each where the mask is causal.
inline void enqueue_attention(const char* name, int products, const at::Tensor& query, const at::Tensor& key, bool causal) {
  const double operations = 2.0 * products * query.numel() * key.size(-2) * (causal ? 0.5 : 1);
  count("kernels");
  enqueue(stream_of(query), {[] {}, name, std::max(operations / settings.costs.flops, 4 * bytes_of(query) / settings.costs.memory)});
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout,
    bool causal, bool, std::optional<double> scale) {
  at::Tensor none = at::empty({0}, query.options());
  if (!settings.dry) {
    auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale);
    return {output, sums, none, none, query.size(-2), key.size(-2), none, none, none};
  }
  enqueue_attention("attention", 2, query, key, causal);
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  at::Tensor sums = at::empty(query.sizes().slice(0, query.dim() - 1), query.options().dtype(at::kFloat));
  return {at::empty(sizes, query.options()), sums, none, none, query.size(-2), key.size(-2), none, none, none};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& gradient, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask, std::array<bool, 4>, const at::Tensor& output,
    const at::Tensor& sums, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  if (!settings.dry) {
    auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, sums, dropout, causal, mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt, scale);
    return {of_query, of_key, of_value, at::Tensor()};
  }
  enqueue_attention("attention_backward", 5, query, key, causal);
  return {at::empty_like(query), at::empty_like(key), at::empty_like(value), at::Tensor()};
}

// The host waits for convolutions: they are computed by the general operator of the CPU, which has no kernel to launch.
inline at::Tensor as_is(const at::Tensor& tensor) {
  return tensor.defined() ? raw(tensor) : tensor;
}
inline at::Tensor put(const at::Tensor& found, const at::Tensor& like) {
  if (!found.defined()) return found;
  at::Tensor made = at::empty(found.sizes(), like.options());
  enqueue_copy(stream_of(like), "convolution", raw(made), found, 0, -1);
  return made;
}
inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  c10::DeviceGuard guard(input.device());
  synchronize(stream_of(input), "convolution");
  at::Tensor found;
  {
    OnlyKernels only;
    found = at::convolution(raw(input), raw(weight), as_is(bias.value_or(at::Tensor())), stride, padding, dilation, transposed, output_padding, groups);
  }
  return put(found, input);
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& input,
    const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  c10::DeviceGuard guard(input.device());
  synchronize(stream_of(input), "convolution");
  std::tuple<at::Tensor, at::Tensor, at::Tensor> found;
  {
    OnlyKernels only;
    const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
    found = at::convolution_backward(raw(gradient), raw(input), raw(weight), at::IntArrayRef{channels}, stride, padding, dilation, transposed, output_padding, groups, mask);
  }
  return {put(std::get<0>(found), input), put(std::get<1>(found), input), put(std::get<2>(found), input)};
}

} // namespace late
