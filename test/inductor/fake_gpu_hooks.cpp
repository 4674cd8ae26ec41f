// One pretended CUDA device on a machine without a driver, for a CUDA build of torch.
// Loaded before `import torch`: the hooks object is made at the first question and kept.
// See fake_gpu.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct FakeHooks : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs /*unused*/) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex /*unused*/) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
  DeviceIndex exchangeDevice(DeviceIndex /*unused*/) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex /*unused*/) const override {
    return 0;
  }
};

// The stock no-op guard raises where autograd asks for streams and events.
struct FakeGuard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() {
    return Device(DeviceType::CUDA, 0);
  }
  static Stream stream() {
    return Stream(Stream::DEFAULT, device());
  }
  Device exchangeDevice(Device /*unused*/) const override {
    return device();
  }
  Device getDevice() const override {
    return device();
  }
  DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  Stream getStream(Device /*unused*/) const noexcept override {
    return stream();
  }
  Stream getDefaultStream(Device /*unused*/) const override {
    return stream();
  }
  Stream getStreamFromGlobalPool(Device /*unused*/, bool /*unused*/)
      const override {
    return stream();
  }
  Stream getNewStream(Device /*unused*/, int /*unused*/) const override {
    return stream();
  }
  Stream exchangeStream(Stream /*unused*/) const noexcept override {
    return stream();
  }
  void recordDataPtrOnStream(
      const c10::DataPtr& /*unused*/,
      const Stream& /*unused*/) const override {}
  void record(
      void** /*unused*/,
      const Stream& /*unused*/,
      const DeviceIndex /*unused*/,
      const c10::EventFlag /*unused*/) const override {}
  void block(void* /*unused*/, const Stream& /*unused*/) const override {}
  bool queryEvent(void* /*unused*/) const override {
    return true;
  }
  void synchronizeDevice(const DeviceIndex /*unused*/) const override {}
  void synchronizeEvent(void* /*unused*/) const override {}
};

} // namespace

namespace at {
// Of the key that at::detail::getCUDAHooks() asks for, before libtorch_cuda's.
static c10::Registerer<
    std::string,
    std::unique_ptr<at::CUDAHooksInterface>,
    at::CUDAHooksArgs>
    fake_hooks(
        "CUDAHooks",
        c10::REGISTRY_PREFERRED,
        CUDAHooksRegistry(),
        [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
          return std::make_unique<FakeHooks>(args);
        });
} // namespace at

extern "C" void install_fake_guard() {
  c10::impl::registerDeviceGuard(DeviceType::CUDA, new FakeGuard());
}
