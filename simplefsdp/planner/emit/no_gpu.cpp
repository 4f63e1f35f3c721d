// Lets fake CUDA tensors pass through torch's C++ autograd engine where there is no GPU, in CPU and CUDA builds of torch.
//
// Before it runs a backward, the engine asks which stream each CUDA device is on, and restores it afterwards. Without a
// device guard for CUDA it refuses. This file answers for one device whose streams and events do nothing: there is
// nothing to order, because fake tensors have no memory and no kernel is started.
//
// simplefsdp/planner/emit/guard.py builds it, and loads it before anything asks torch about CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

namespace {

constexpr c10::DeviceIndex kOnly = 0;

class AbsentDevice final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kOnly + 1; }

  c10::Device getDevice() const override { return c10::Device(type(), kOnly); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, getDevice(), /*id=*/0);
  }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(getDevice()); }

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

// What the engine and torch.accelerator ask besides: is CUDA part of torch, and has the device been used.
class AbsentHooks final : public at::CUDAHooksInterface {
 public:
  explicit AbsentHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return false; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
};

std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs args) {
  return std::make_unique<AbsentHooks>(args);
}

}  // namespace

// Returns whether torch uses what is registered here: it keeps the first hooks it has asked for.
extern "C" bool simplefsdp_pretend_cuda() {
  at::CUDAHooksRegistry()->Register("CUDAHooks", make_hooks, c10::REGISTRY_PREFERRED);
  static AbsentDevice device;
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &device);
  return dynamic_cast<const AbsentHooks*>(&at::detail::getCUDAHooks()) != nullptr;
}
