#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

/*
The autocast rule of _grouped_mm: cast to the lower precision, as for mm.
It has a file of its own because the backends that implement the op are fewer
than those of AT_FORALL_LOWER_PRECISION_FP (compare cudnn/AutocastRNN.cpp).
*/

namespace at::autocast {

TORCH_LIBRARY_IMPL(aten, AutocastCPU, m) {
  KERNEL_CPU(_grouped_mm, lower_precision_fp)
}

TORCH_LIBRARY_IMPL(aten, AutocastCUDA, m) {
  KERNEL_CUDA(_grouped_mm, lower_precision_fp)
}

TORCH_LIBRARY_IMPL(aten, AutocastXPU, m) {
  KERNEL_XPU(_grouped_mm, lower_precision_fp)
}

TORCH_LIBRARY_IMPL(aten, AutocastMPS, m) {
  KERNEL_MPS(_grouped_mm, lower_precision_fp)
}

} // namespace at::autocast
