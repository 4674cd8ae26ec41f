// Functions that generated autograd code calls, but that the wheel does not
// export (hidden visibility). A PyTorch build links them inside one library;
// our libtorch.so is a second library and must bring its own.
//
// Every entry is a deviation from "as if PyTorch had been built with the
// change". Keep the list minimal: the linker (-z defs) names what is missing.
// A kernel should call an exported at:: function instead of growing this file.

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <vector>

// torch/csrc/autograd/VariableTypeManual.cpp. Called by every generated
// VariableType function to check its tensor arguments.
namespace torch::autograd::VariableType {

const at::Tensor& unpack(const at::Tensor& t, const char* name, int pos) {
  TORCH_CHECK(
      t.defined(),
      "Expected a proper Tensor but got None (or an undefined Tensor in C++) ",
      "for argument #",
      pos,
      " '",
      name,
      "'");
  return t;
}

at::Tensor& unpack(at::Tensor& t, const char* name, int pos) {
  unpack(static_cast<const at::Tensor&>(t), name, pos);
  return t;
}

at::Tensor unpack_opt(const at::Tensor& t, const char* name, int pos) {
  return t.defined() ? unpack(t, name, pos) : at::Tensor();
}

std::vector<at::Tensor> unpack(
    const at::ITensorListRef& tensors,
    const char* name,
    int pos) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& t : tensors) {
    result.push_back(unpack(t, name, pos));
  }
  return result;
}

} // namespace torch::autograd::VariableType
