// Tensors of a device: made, copied, resized, and viewed.
#pragma once

#include "guard.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>

namespace late {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == KIND;
}
inline Stream& stream_of(const at::Tensor& tensor) {
  return here(tensor.device().index());
}
inline double bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<double>(tensor.nbytes()) : 0;
}

// The tensor as a kernel sees it. It does not keep the memory alive: neither does a kernel of a real device.
inline at::Tensor raw(const at::Tensor& tensor) {
  void* pointer = tensor.numel() ? inside(tensor.data_ptr()) : nullptr;
  auto made = at::from_blob(pointer, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
  made._set_conj(tensor.is_conj());  // a view that is conjugated, or negated, when it is read
  made._set_neg(tensor.is_neg());
  return made;
}

// In its scope, kernels of the CPU are called without autograd, autocast and Python.
struct OnlyKernels {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::autocast_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// -- made --------------------------------------------------------------------------------------------------------------

inline at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only memory of the CPU can be pinned.");
  c10::DeviceGuard guard(device.value_or(Device(KIND, static_cast<DeviceIndex>(current))));
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only memory of the CPU can be pinned.");
  c10::DeviceGuard guard(device.value_or(Device(KIND, static_cast<DeviceIndex>(current))));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// -- copied ------------------------------------------------------------------------------------------------------------

inline void enqueue_copy(Stream& stream, const char* name, const at::Tensor& to, const at::Tensor& from, double seconds, int engine) {
  enqueue(stream, {[to, from] { OnlyKernels only; to.copy_(from); }, name, seconds, engine});
}

// Between two devices both current streams wait for each other, as with CUDA.
inline void copy_on_devices(const at::Tensor& source, const at::Tensor& target) {
  Stream &work = stream_of(source), &other = stream_of(target);
  if (&work != &other) wait_for(work, mark(other));
  enqueue_copy(work, "copy", raw(target), raw(source), 2 * bytes_of(target) / settings.costs.memory, -1);
  if (&work != &other) wait_for(other, mark(work));
}

// Pinned memory is read and written when the stream comes to the copy. Pageable memory goes by way of a buffer of the
// driver: a small upload has been read when the call returns, a large one and each download have ended.
inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  InBackend timed;
  const bool up = !is_ours(source), down = !is_ours(target);
  if (!up && !down) {
    copy_on_devices(source, target);
    return target;
  }
  const at::Tensor& on_host = up ? source : target;
  Stream& stream = stream_of(up ? target : source);
  check_not_lost(stream.device);
  const bool pinned = pinned_memory.find(on_host.data_ptr());
  const char* way = up ? "up" : "down";
  const char* kind = pinned ? ", pinned" : ", pageable";
  count(c10::str("copies ", way, kind));
  count(c10::str("bytes ", way, kind), static_cast<int64_t>(bytes_of(on_host)));
  const bool through_buffer = up && !pinned && !settings.dry;
  const double rate = pinned ? settings.costs.link : settings.costs.pageable_link;
  enqueue_copy(stream, way, raw(target), through_buffer ? source.clone() : raw(source), bytes_of(on_host) / rate, up ? 0 : 1);
  if (pinned) pinned_memory.record_event(on_host.data_ptr(), nullptr, Guard::theirs(stream));
  const bool waits = !pinned && (down || bytes_of(on_host) > 65536);
  if (!non_blocking || waits) synchronize(stream, up ? "upload" : "download");
  return target;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// -- resized -----------------------------------------------------------------------------------------------------------

inline const at::Tensor& resize_(const at::Tensor& self, at::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  const size_t needed = (self.numel() + self.storage_offset()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (needed <= storage->nbytes()) return self;
  c10::DeviceGuard guard(self.device());
  at::DataPtr made = device_memory.allocate(needed);
  if (const size_t size = storage->nbytes())
    enqueue(stream_of(self), {[to = inside(made.get()), from = inside(storage->data()), size] { std::memcpy(to, from, size); }, "resize"});
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(needed);
  return self;
}

// -- viewed ------------------------------------------------------------------------------------------------------------

inline at::Tensor view(const at::Tensor& self, at::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
inline at::Tensor as_strided(const at::Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto number = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), number);
}
inline at::Tensor reshape_alias(const at::Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  if (stride.empty() && !size.empty()) tensor->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else tensor->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}
inline void record_stream(at::Tensor& self, at::Stream stream) {
  device_memory.recordStream(self.storage().data_ptr(), stream);
}

} // namespace late
