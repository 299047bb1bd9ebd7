// What torch asks of a CUDA build before it lets tensors say `cuda:0` and runs their backward pass: a guard that counts
// two devices, and hooks that say they are there. Nothing is behind them. Loaded before torch (process.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

thread_local Device current(DeviceType::CUDA, 0);

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override { return std::exchange(current, device); }
  Device getDevice() const override { return current; }
  void setDevice(Device device) const override { current = device; }
  void uncheckedSetDevice(Device device) const noexcept override { current = device; }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

struct CUDAHooks : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 2; }
  DeviceIndex current_device() const override { return current.index(); }
  DeviceIndex getCurrentDevice() const override { return current.index(); }
};

}  // namespace

extern "C" int current_device() { return current.index(); }
extern "C" void set_device(int index) { current = Device(DeviceType::CUDA, static_cast<DeviceIndex>(index)); }

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch looks for this name
}
