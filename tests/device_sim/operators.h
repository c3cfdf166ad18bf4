// Operators of the device: the CPU's own, launched on a stream over the same memory.

#pragma once

#include <optional>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"
#include "streams.h"

namespace device_sim {

inline bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kOurs;
}

// A tensor like this one over other memory, or over none.
inline Tensor like(const Tensor& tensor, c10::DataPtr data, c10::DispatchKey key) {
  auto* const allocator = c10::GetAllocator(data.device().type());
  // Only what has no memory may be resized: the host does that to what it launches on, and at once.
  auto storage = c10::Storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      std::move(data),
      allocator,
      /*resizable=*/key == c10::DispatchKey::Meta);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return made;
}

// The CPU's tensor over the same memory: of the device, or page-locked. Of other memory of the host
// a kernel has what was in it when it was launched.
inline Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  const auto& data = tensor.storage().data_ptr();
  if (data.get_deleter() == &let_go && data.get_context() != nullptr) {
    auto block = c10::intrusive_ptr<Block>::reclaim_copy(static_cast<Block*>(data.get_context()));
    return like(tensor, held(std::move(block), c10::kCPU), c10::DispatchKey::CPU);
  }
  if (is_ours(tensor)) {
    return like(tensor, {nullptr, c10::kCPU}, c10::DispatchKey::CPU);
  }
  auto copied = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copied.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copied;
}

// The same without any memory. A single number of the host may be among tensors of any device.
inline Tensor on_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) {
    return tensor;
  }
  return like(tensor, {nullptr, c10::kMeta}, c10::DispatchKey::Meta);
}

// The value with each of its tensors replaced.
template <class Replace>
inline IValue with_tensors(const IValue& value, Replace&& replace) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const auto& each : value.toTensorVector()) {
      made.push_back(replace(each));
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList()) {
      made.push_back(each ? std::optional<Tensor>(replace(*each)) : std::nullopt);
    }
    return made;
  }
  return value;
}

inline Stack with_tensors(const Stack& values, Tensor (*replace)(const Tensor&), c10::DeviceType device) {
  Stack made;
  for (const auto& each : values) {
    const bool is_device = each.isDevice() && each.toDevice().type() == kOurs;
    made.push_back(is_device ? IValue(c10::Device(device)) : with_tensors(each, replace));
  }
  return made;
}

inline std::vector<Tensor> tensors_of(const Stack& values) {
  std::vector<Tensor> found;
  for (const auto& value : values) {
    with_tensors(value, [&found](const Tensor& each) {
      found.push_back(each);
      return each;
    });
  }
  return found;
}

inline void copy_each(const std::vector<Tensor>& from, const std::vector<Tensor>& to) {
  for (size_t at = 0; at < to.size(); ++at) {
    if (to[at].defined()) {
      to[at].copy_(from[at]);
    }
  }
}

inline Tensor new_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> device,
    std::optional<bool> /*pin_memory*/) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kOurs, current_device)));
  return at::detail::empty_strided_generic(
      size,
      stride,
      &device_memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

inline Tensor new_empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> device,
    std::optional<bool> /*pin_memory*/,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kOurs, current_device)));
  return at::detail::empty_generic(
      size,
      &device_memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

inline Tensor view_of(
    const Tensor& self,
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// What an operator returns, after what its meta kernel, or the CPU's, has told of it: an argument
// that it has written to, a view of one, or a new tensor, which is also put into *fresh*.
inline IValue returned(
    const c10::FunctionSchema& schema,
    const c10::Argument& declared,
    const IValue& told,
    const Stack& arguments,
    c10::Device device,
    std::vector<Tensor>& fresh) {
  for (size_t at = 0; declared.alias_info() != nullptr && at < arguments.size(); ++at) {
    const auto* const alias = schema.arguments()[at].alias_info();
    if (alias == nullptr || !(*alias == *declared.alias_info())) {
      continue;
    }
    if (alias->isWrite()) {
      return arguments[at];
    }
    return with_tensors(told, [&](const Tensor& view) {
      const auto& base = arguments[at].toTensor();
      return view_of(base, view.sizes(), view.strides(), view.storage_offset());
    });
  }
  return with_tensors(told, [&](const Tensor& each) {
    fresh.push_back(
        each.defined() ? new_strided(
                             each.sizes(), each.strides(), each.scalar_type(), {}, device, {})
                       : each);
    return fresh.back();
  });
}

// Gives the arguments that an operator writes to the sizes that it wants.
inline void resize_written(
    const c10::FunctionSchema& schema, const Stack& arguments, const Stack& told) {
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* const alias = schema.arguments()[at].alias_info();
    if (alias == nullptr || !alias->isWrite() || !arguments[at].isTensor()) {
      continue;
    }
    const auto& ours = arguments[at].toTensor();
    const auto& wanted = told[at].toTensor();
    if (is_ours(ours) && ours.sizes() != wanted.sizes()) {
      at::native::resize_(ours, wanted.sizes());
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(wanted.sizes(), wanted.strides());
    }
  }
}

// Whether all that an operator returns is what it was given to write to, sizes included. Many meta
// kernels are Python's, and take ten times as long as the launch.
inline bool only_writes(const c10::FunctionSchema& schema, const Stack& arguments) {
  for (const auto& each : schema.returns()) {
    if (each.alias_info() == nullptr || !each.alias_info()->isWrite()) {
      return false;
    }
  }
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* const alias = schema.arguments()[at].alias_info();
    // One without elements will be resized.
    if (alias != nullptr && alias->isWrite() && arguments[at].isTensor() &&
        arguments[at].toTensor().numel() == 0) {
      return false;
    }
  }
  return true;
}

// Every operator that has no kernel here. Its meta kernel tells the sizes of what it returns, and
// the CPU's kernel is launched. Without a meta kernel, or where the sizes are a matter of data, the
// host waits and calls the CPU's kernel itself.
inline void launch(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      "the CPU has no ", op.operator_name(), ", so this device has none");
  const Stack arguments(stack->end() - schema.arguments().size(), stack->end());
  torch::jit::drop(*stack, arguments.size());
  c10::Device device(kOurs, current_device);
  for (const auto& each : tensors_of(arguments)) {
    if (is_ours(each)) {
      device = each.device();
      break;
    }
  }
  auto& stream = current_stream(device.index());

  Stack told = arguments;
  bool is_told = true;
  if (only_writes(schema, arguments)) {
    told.resize(schema.returns().size());
  } else {
    told = with_tensors(arguments, &on_meta, c10::kMeta);
    const Stack given = told;
    try {
      op.callBoxed(&told);
      resize_written(schema, arguments, given);
    } catch (const std::exception&) {
      // A mistake of the program's comes again from the CPU's kernel.
      is_told = false;
    }
  }
  Stack on_cpu = with_tensors(arguments, &on_host, c10::kCPU);
  if (!is_told) {
    counts().add(c10::toString(op.operator_name()));
    stream.synchronize("fallback");
    op.callBoxed(&on_cpu);
    told = on_cpu;
  }
  std::vector<Tensor> fresh;
  for (size_t at = 0; at < told.size(); ++at) {
    stack->push_back(returned(schema, schema.returns()[at], told[at], arguments, device, fresh));
  }
  if (is_told && fresh.empty() && !schema.is_mutable() && !told.empty()) {
    // A view: there is nothing to compute.
    return;
  }
  std::vector<Tensor> results;
  for (const auto& each : fresh) {
    results.push_back(on_host(each));
  }
  if (!is_told) {
    copy_each(tensors_of(told), results);
    return;
  }
  stream.push([op, on_cpu, results] {
    Stack values = on_cpu;
    op.callBoxed(&values);
    if (!results.empty()) {
      copy_each(tensors_of(values), results);
    }
  });
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto device = (is_ours(to) ? to : from).device().index();
  auto& stream = current_stream(device);
  const bool pinned = to.is_cpu() && to.storage().data_ptr().get_deleter() == &let_go;
  const Tensor target = to.is_cpu() && !pinned ? to : on_host(to);
  const bool between = is_ours(from) && from.device().index() != device;
  if (between) {
    stream.wait_for(current_stream(from.device().index()).record());
  }
  stream.push([source = on_host(from), target] { target.copy_(source); });
  if (between) {
    current_stream(from.device().index()).wait_for(stream.record());
  }
  const bool with_host = from.is_cpu() || to.is_cpu();
  // As under CUDA: only into page-locked memory a copy does not wait.
  if ((to.is_cpu() && !pinned) || (with_host && !non_blocking)) {
    stream.synchronize("copy");
  }
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

inline c10::Scalar local_scalar_dense(const Tensor& self) {
  current_stream(self.device().index()).synchronize("item");
  return at::_local_scalar_dense(on_host(self));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &new_empty);
  m.impl("empty_strided", &new_strided);
  m.impl("as_strided", &view_of);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  // Kernels hold the memory that they use: see Block.
  m.impl("record_stream", [](Tensor& /*self*/, c10::Stream /*stream*/) {});
  // Torch would put these together from others, which round otherwise than the CPU's, or are not
  // there.
  for (const auto* name :
       {"convolution", "convolution_backward", "native_group_norm", "native_layer_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

}  // namespace device_sim
