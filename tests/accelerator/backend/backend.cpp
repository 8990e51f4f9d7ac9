// An accelerator made of the CPU: a backend of torch's PrivateUse1, to see what a real one would hide.
// docs/dev/accelerator.md states what it shows and what it does not.
#include "kernels.h"
#include "recurrent.h"

#include <ATen/autocast_mode.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace late {

REGISTER_ALLOCATOR(KIND, &device_memory);
REGISTER_HOST_ALLOCATOR(KIND, &pinned_memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
[[maybe_unused]] const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
// A copy reads conjugated and negated views itself: torch's fallback would copy them first, and so without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// The tables of torch's own autocast.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
#define LATE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define LATE_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define LATE_FLOAT_OUT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define LATE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
using namespace at;
using namespace at::autocast;
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LATE_LOWER)
  AT_FORALL_FP32(LATE_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(LATE_FLOAT_OUT)
  AT_FORALL_PROMOTE(LATE_PROMOTE)
}

void start(int devices, bool dry) {
  TORCH_CHECK(!front, "late has been started.");
  TORCH_CHECK(devices >= 1 && devices <= MOST_DEVICES, "late has 1 to ", MOST_DEVICES, " devices, found ", devices, ".");
  settings.devices = devices;
  settings.dry = dry;
  if (dry) settings.order = Order::eager;
  reserve_addresses();
}

} // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::sdp_choice)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace late;
  using NoInterpreter = py::call_guard<py::gil_scoped_release>;
  py::enum_<Order>(m, "Order").value("late", Order::late).value("random", Order::random).value("eager", Order::eager);
  m.def("start", &start, NoInterpreter());
  m.def("set_order", &set_order, NoInterpreter());
  m.def("device_count", [] { return settings.devices; });
  m.def("current_device", [] { return current; });
  m.def("set_device", &set_current);
  m.def("synchronize", &synchronize_device, NoInterpreter());
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(static_cast<DeviceIndex>(device))));
  });
  m.def("set_memory", [](int device, size_t limit) { Lock lock(machine); memories[device].limit = limit; }, NoInterpreter());
  m.def("set_costs", [](double launch, double link, double pageable_link, double memory, double flops) {
    Lock lock(machine);
    settings.costs = {launch, link, pageable_link, memory, flops};
  }, NoInterpreter());
  m.def("lose", &lose, NoInterpreter());
  m.def("start_again", &start_again, NoInterpreter());
  m.def("pending", [](int device) {
    Lock lock(machine);
    size_t sum = 0;
    for (auto& one : streams[device]) sum += one->given - one->done;
    return sum;
  }, NoInterpreter());
  m.def("counts", [] { Lock lock(machine); return std::exchange(counts, {}); }, NoInterpreter());
  m.def("host_seconds", [] { return host_nanoseconds.exchange(0) / 1e9; });
  m.def("clock", [] {
    Lock lock(machine);
    double latest = latest_host;
    for (auto& of_device : streams) for (auto& one : of_device) latest = std::max(latest, one->clock);
    return latest;
  }, NoInterpreter());
  m.def("trace", [] { Lock lock(machine); return std::exchange(spans, {}); }, NoInterpreter());
}
