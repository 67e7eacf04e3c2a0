// A device "cuda" for PyTorch's CPU build. Its tensors lie in CPU memory, and the CPU computes.
//
// PyTorch selects the kernel of an operator by the device of its tensors. A CPU build has no kernel
// for "cuda". This file registers a single one for all operators, fallback(), which takes these
// steps:
//
//  1. It replaces each GPU tensor by a CPU tensor in the same memory.
//  2. It refuses what a GPU refuses: tensors on two devices, or a CPU generator for a GPU tensor.
//  3. It calls the CPU's kernel, which reads and writes that memory.
//  4. It turns each result into a GPU tensor, again in the same memory.
//
// Only operators that allocate memory, copy between devices or take a storage have kernels of their
// own. Besides kernels, PyTorch asks a device for an allocator, for random generators, for the
// current GPU of each thread (the guard) and, under DDP, for a clock. The file provides these, too.
//
// The file also counts how often the CPU would wait for the GPU. A wait is
//  - a copy between CPU and GPU, except with non_blocking=True from or to pinned memory;
//  - an operator that needs a value on the CPU, for example item();
//  - an operator whose result has a size that depends on values, for example nonzero().
//
// The file cannot show what depends on a real GPU. It has no GPU kernels, so it says nothing about
// their rounding, speed or bugs. Each operation is finished before its call returns, so a missing
// synchronisation goes unnoticed. GPU memory has no limit, and gloo takes the place of NCCL.
//
// simulated_gpu.py compiles and loads this file.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

constexpr DeviceIndex kMostGpus = 16;
std::atomic<int64_t> waits{0};
thread_local DeviceIndex current_gpu = 0;

// As with real GPUs, CUDA_VISIBLE_DEVICES="" hides them all.
DeviceIndex gpu_count() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible && !*visible) {
    return 0;
  }
  const char* number = std::getenv("SIMULATED_GPUS");
  return std::min<int>(number ? std::atoi(number) : 8, kMostGpus);
}

Device gpu(DeviceIndex index) {
  return Device(DeviceType::CUDA, index < 0 ? current_gpu : index);
}

// ---- memory

void drop_storage(void* storage) {
  delete static_cast<c10::Storage*>(storage);
}

struct GpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::alloc_cpu(bytes);
    return {memory, memory, &c10::free_cpu, gpu(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &c10::free_cpu;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} gpu_allocator;

// Pinned memory is ordinary memory that is remembered here, so that is_pinned() and the count of
// waits know it.
std::mutex pinned_mutex;
std::unordered_set<void*> pinned_memory;

void free_pinned(void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned_memory.erase(memory);
  c10::free_cpu(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_memory.insert(memory);
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} pinned_allocator;

bool is_pinned(const void* begin_of_storage) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  return pinned_memory.count(const_cast<void*>(begin_of_storage)) > 0;
}

// Return a tensor on `device` in the memory of `tensor`, which it keeps alive.
Tensor same_memory(const Tensor& tensor, Device device) {
  auto* owner = new c10::Storage(tensor.storage());
  auto* memory = const_cast<void*>(owner->data());
  c10::Allocator* allocator = device.is_cuda() ? &gpu_allocator : c10::GetCPUAllocator();
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(),
                       c10::DataPtr(memory, owner, &drop_storage, device), allocator,
                       /*resizable=*/true);
  const auto key = device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

Tensor on_host(const Tensor& tensor) {
  return tensor.is_cuda() ? same_memory(tensor, Device(DeviceType::CPU)) : tensor;
}

// ---- random numbers

// The generator of a GPU. Kernels draw from `host`, a CPU generator.
struct GpuGenerator final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();

  explicit GpuGenerator(Device device)
      : c10::GeneratorImpl(device, DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "A simulated GPU's generator has no offset.");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "A simulated GPU's generator has no offset.");
  }
  GpuGenerator* clone_impl() const override {
    auto* copy = new GpuGenerator(device_);
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < kMostGpus; i++) {
      made.push_back(at::make_generator<GpuGenerator>(gpu(i)));
    }
    return made;
  }();
  return generators.at(gpu(index).index());
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<GpuGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

// ---- the fallback

// Return `value`, a tensor or lists of tensors, with each tensor replaced by change(tensor).
IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  }
  if (!value.isList()) {
    return value;
  }
  const auto type = value.toList().elementType();
  const bool holds_tensors = type->kind() == c10::TypeKind::TensorType ||
      type->kind() == c10::TypeKind::OptionalType || type->kind() == c10::TypeKind::ListType;
  if (!holds_tensors) {
    return value;
  }
  c10::impl::GenericList list(type);
  for (const IValue& element : value.toListRef()) {
    list.push_back(map_tensors(element, change));
  }
  return list;
}

// The operators that wait on a real GPU, besides copies and x[i]. multinomial() checks its
// probabilities on the CPU, and bincount() and repeat_interleave() need a size.
const std::unordered_set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select",
    "aten::multinomial", "aten::bincount", "aten::repeat_interleave", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive"};

// Each GPU tensor of a call, and the CPU tensor that stands in for it
using Pairs = std::vector<std::pair<Tensor, Tensor>>;

// A function that turns a result on the CPU into a GPU tensor. An argument that is returned stays
// the same tensor, and a view of an argument shares its storage.
struct Raise {
  Pairs lowered;
  Device device;

  Tensor operator()(const Tensor& result) const {
    for (const auto& [on_gpu, on_cpu] : lowered) {
      if (on_cpu.is_same(result)) {
        return on_gpu;
      }
      if (result.is_cpu() && result.storage().is_alias_of(on_cpu.storage())) {
        return view_of(on_gpu, result);
      }
    }
    return result.is_cuda() ? result : same_memory(result, device);
  }

  // Return a tensor in the storage of `on_gpu` that has the shape of `result`.
  static Tensor view_of(const Tensor& on_gpu, const Tensor& result) {
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(on_gpu.storage()), on_gpu.key_set(), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(
        result.sizes(), result.strides(), result.storage_offset());
    return view;
  }
};

// A collective that is in progress on the CPU. DDP takes its result from getFuture().
class GpuWork final : public c10d::Work {
 public:
  GpuWork(c10::intrusive_ptr<c10d::Work> host, Raise raise)
      : host_(std::move(host)), raise_(std::move(raise)) {}
  bool isCompleted() override {
    return host_->isCompleted();
  }
  bool isSuccess() const override {
    return host_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return host_->exception();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return host_->wait(timeout);
  }
  void synchronize() override {
    host_->synchronize();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto type = c10::ListType::create(c10::TensorType::get());
    const std::vector<Device> devices = {raise_.device};
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, devices);
    host_->getFuture()->addCallback([future, raise = raise_](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
      } else {
        future->markCompleted(map_tensors(done.value(), raise));
      }
    });
    return future;
  }

 private:
  c10::intrusive_ptr<c10d::Work> host_;
  Raise raise_;
};

// One call of an operator with GPU tensors.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    lower_arguments();
    refuse_what_a_gpu_refuses();
    waits += kWaiting.count(schema_.name()) + waits_for_indices();
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    adopt_new_memory();
    raise_results();
  }

 private:
  // Replace GPU tensors, devices and generators by their CPU counterparts.
  void lower_arguments() {
    const auto& arguments = schema_.arguments();
    const size_t first = stack_.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      lower(stack_[first + i], arguments[i]);
    }
    // Generators come last, because only now is the call known to run on a GPU.
    for (size_t i = 0; i < arguments.size(); i++) {
      if (arguments[i].name() == "generator") {
        lower_generator(stack_[first + i]);
      }
    }
  }

  void lower(IValue& value, const c10::Argument& argument) {
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = gpu(value.toDevice().index());
      value = Device(DeviceType::CPU);
      return;
    }
    if (argument.name() == "values" && value.isTensor()) {
      writes_one_value_ = value.toTensor().numel() == 1;
    }
    const bool is_index = argument.name() == "indices" && value.isList();
    value = map_tensors(value, [&](const Tensor& tensor) {
      if (is_index) {
        note_index(tensor);
      } else if (!tensor.is_cuda() && !can_be_on_cpu(tensor, value, argument)) {
        stray_ = argument.name();
      }
      return tensor.is_cuda() ? lowered(tensor) : tensor;
    });
  }

  // A GPU copies indices from the CPU.
  void note_index(const Tensor& tensor) {
    const bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    indexes_by_mask_ |= is_mask && tensor.is_cuda();
    index_copies_ += !tensor.is_cuda();
  }

  // The value of a tensor without dimensions is passed to a GPU's kernel. The kernel cannot write
  // to such a tensor, and a list of them is no value.
  static bool can_be_on_cpu(const Tensor& tensor, const IValue& value,
                            const c10::Argument& argument) {
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    return tensor.dim() == 0 && value.isTensor() && !is_written;
  }

  Tensor lowered(const Tensor& tensor) {
    for (const auto& [on_gpu, on_cpu] : lowered_) {
      if (on_gpu.is_same(tensor)) {
        return on_cpu;
      }
    }
    lowered_.emplace_back(tensor, on_host(tensor));
    return lowered_.back().second;
  }

  void lower_generator(IValue& value) {
    if (value.isNone()) {
      if (runs_on_gpu()) {
        value = host_generator(default_generator(device().index()));
      }
    } else if (value.toGenerator().device().is_cuda()) {
      value = host_generator(value.toGenerator());
    } else {
      has_cpu_generator_ = true;
    }
  }

  void refuse_what_a_gpu_refuses() const {
    const char* two_devices = "Expected all tensors to be on the same device, but found at least "
                              "two devices, ";
    TORCH_CHECK(!runs_on_gpu() || stray_.empty(), two_devices, device(), " and cpu! (argument ",
                stray_, " of ", schema_.name(), ")");
    TORCH_CHECK(!runs_on_gpu() || !has_cpu_generator_, "Expected a 'cuda' device type for ",
                "generator but found 'cpu' (", schema_.name(), ")");
    for (const auto& [on_gpu, on_cpu] : lowered_) {
      TORCH_CHECK(on_gpu.device() == device(), two_devices, device(), " and ", on_gpu.device(),
                  "! (", schema_.name(), ")");
    }
  }

  // x[i] = values copies CPU indices. If i is a mask, it needs the number of elements in the mask,
  // except for a single value. For x[i] alone, PyTorch does both before it calls the kernel.
  int64_t waits_for_indices() const {
    const bool is_assignment = schema_.name() == "aten::_index_put_impl_";
    return is_assignment ? index_copies_ + (indexes_by_mask_ && !writes_one_value_) : 0;
  }

  bool runs_on_gpu() const {
    return device_ || !lowered_.empty();
  }

  Device device() const {
    if (device_) {
      return *device_;
    }
    return lowered_.empty() ? gpu(-1) : lowered_[0].first.device();
  }

  // The kernel may have given a tensor other memory or another shape, for example with out=.
  void adopt_new_memory() const {
    for (const auto& [on_gpu, on_cpu] : lowered_) {
      const bool moved = on_gpu.storage().data() != on_cpu.storage().data();
      if (moved || on_gpu.sizes() != on_cpu.sizes() || on_gpu.strides() != on_cpu.strides()) {
        auto* tensor = on_gpu.unsafeGetTensorImpl();
        if (moved) {
          tensor->set_storage_keep_dtype(same_memory(on_cpu, on_gpu.device()).storage());
        }
        tensor->set_sizes_and_strides(on_cpu.sizes(), on_cpu.strides(), on_cpu.storage_offset());
      }
    }
  }

  void raise_results() {
    const Raise raise{lowered_, device()};
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); i++) {
      if (stack_[i].isCustomClass()) {
        c10::intrusive_ptr<c10d::Work> work =
            c10::make_intrusive<GpuWork>(stack_[i].toCustomClass<c10d::Work>(), raise);
        stack_[i] = IValue(std::move(work));
      } else {
        stack_[i] = map_tensors(stack_[i], raise);
      }
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;          // the arguments, later the results
  Pairs lowered_;                     // the GPU tensors among the arguments
  std::optional<Device> device_;      // the argument "device", if it is a GPU
  std::string stray_;                 // an argument that holds a CPU tensor and must not
  bool has_cpu_generator_ = false;
  bool indexes_by_mask_ = false;
  bool writes_one_value_ = false;
  int64_t index_copies_ = 0;
};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}

// ---- operators with kernels of their own

// Return the GPU to allocate memory on.
Device existing_gpu(const std::optional<Device>& device) {
  const Device found = gpu(device ? device->index() : -1);
  TORCH_CHECK(found.index() < gpu_count(), "CUDA error: invalid device ordinal");
  return found;
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(existing_gpu(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &gpu_allocator, DispatchKeySet(DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(existing_gpu(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &gpu_allocator,
      DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda()) {
    const Tensor& host = self.is_cuda() ? source : self;
    waits += !(non_blocking && is_pinned(host.storage().data()));
  }
  on_host(self).copy_(on_host(source));
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, c10::SymInt offset,
                    c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {c10::SymInt(size)}, {c10::SymInt(1)});
}

// ---- what PyTorch asks a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device getDevice() const override {
    return gpu(-1);
  }
  void setDevice(Device device) const override {
    current_gpu = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_gpu = device.index();
  }
  Device exchangeDevice(Device device) const override {
    return gpu(std::exchange(current_gpu, gpu(device.index()).index()));
  }
  DeviceIndex deviceCount() const noexcept override {
    return gpu_count();
  }
  // There is one stream, and it is always idle: each operation is finished before its call returns.
  c10::Stream getStream(Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, gpu(device.index()));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return stream;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {
    waits++;
  }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
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
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  int getNumGPUs() const override {
    return gpu_count();
  }
  DeviceIndex deviceCount() const override {
    return gpu_count();
  }
  DeviceIndex current_device() const override {
    return current_gpu;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_gpu;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    current_gpu = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(current_gpu, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return std::exchange(current_gpu, gpu(index).index());
  }
  bool isPinnedPtr(const void* memory) const override {
    return is_pinned(memory);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<GpuGenerator>(gpu(index));
  }
};

// DDP measures how long its parts take.
struct Clock final : c10d::Timer {
  explicit Clock(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &gpu_allocator)
namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Clock)
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
}

// The processes talk through gloo, which takes CPU tensors only.
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const char* name : {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_",
                           "allgather_", "_allgather_base_", "barrier"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// What simulated_gpu.py calls, as torch.ops.simulated_gpu.waits() and so on
TORCH_LIBRARY(simulated_gpu, library) {
  library.def("waits", []() -> int64_t { return waits; });
  library.def("wait", []() { waits++; });
  library.def("count", []() -> int64_t { return gpu_count(); });
  library.def("current", []() -> int64_t { return current_gpu; });
  library.def("make_current", [](int64_t index) { current_gpu = static_cast<DeviceIndex>(index); });
  library.def("default_generator", [](int64_t index) {
    return default_generator(static_cast<DeviceIndex>(index));
  });
}
