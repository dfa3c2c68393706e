#include "train/optimizer/state_stream.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace burst {

namespace {

// Vectorized loads can begin at a multiple of this many elements.
constexpr int64_t kAlign = 64;

int64_t Aligned(int64_t elements) { return (elements + kAlign - 1) / kAlign * kAlign; }

}  // namespace

StateStream::StateStream(DeviceType device, DType dtype, int64_t resident)
    : device_(device),
      buffers_{Buffer(device), Buffer(device), Buffer(device)},
      resident_memory_(resident > 0 ? Tensor::Empty({resident}, dtype, device) : Tensor()),
      moved_(device),
      in_(device),
      out_(device) {}

// Gives the step's state a place on the device if there is room. Returns whether it has one.
bool StateStream::Admit(const UpdateStep& step) {
  if (resident_memory_.null()) return false;
  const void* const key = step.state[0].raw_data();
  if (residents_.count(key) > 0) return true;
  int64_t needed = 0;
  for (const Tensor& tensor : step.state) needed += Aligned(tensor.numel());
  if (taken_ + needed > resident_memory_.numel()) return false;
  Resident& resident = residents_[key];
  resident.on_host = step.state;
  for (const Tensor& from : step.state) {
    resident.here.push_back(resident_memory_.Slice(0, taken_, from.numel()));
    in_.Copy(resident.here.back().raw_data(), device_, from.raw_data(), DeviceType::kCpu,
             from.size_bytes(), &moved_);
    taken_ += Aligned(from.numel());
  }
  return true;
}

void StateStream::WriteBack() {
  if (!changed_) return;
  for (const auto& [key, resident] : residents_) {
    for (size_t i = 0; i < resident.here.size(); ++i) {
      const Tensor& to = resident.on_host[i];
      out_.Copy(to.raw_data(), DeviceType::kCpu, resident.here[i].raw_data(), device_,
                to.size_bytes(), &moved_);
    }
  }
  moved_.Wait();
  changed_ = false;
}

absl::Status StateStream::Run(absl::Span<const UpdateStep> steps) {
  std::vector<const UpdateStep*> copied;  // the steps whose state comes and goes
  int64_t rows = 0, longest = 0;
  for (const UpdateStep& step : steps) {
    if (step.state.empty() || Admit(step)) continue;
    copied.push_back(&step);
    rows = std::max(rows, static_cast<int64_t>(step.state.size()));
    longest = std::max(longest, step.state[0].numel());
  }
  const int64_t stride = Aligned(longest);
  for (Buffer& buffer : buffers_) {
    if (copied.empty()) break;
    buffer.memory = Tensor::Empty({rows, stride}, copied[0]->state[0].dtype(), device_);
  }

  const auto buffer_of = [&](size_t i) -> Buffer& { return buffers_[i % buffers_.size()]; };
  std::vector<std::vector<Tensor>> here(copied.size());  // the state of each on the device
  const auto fetch = [&](size_t i) {
    if (i >= copied.size()) return;
    Buffer& buffer = buffer_of(i);
    if (i >= buffers_.size()) buffer.emptied.Wait();
    for (const Tensor& from : copied[i]->state) {
      const auto row = static_cast<int64_t>(here[i].size());
      here[i].push_back(buffer.memory.Slice(0, row, 1).View({-1}).Slice(0, 0, from.numel()));
      in_.Copy(here[i].back().raw_data(), device_, from.raw_data(), DeviceType::kCpu,
               from.size_bytes(), &buffer.filled);
    }
  };
  fetch(0);
  fetch(1);
  if (!residents_.empty()) moved_.Wait();
  absl::Status status;
  size_t i = 0;  // number of the next copied step
  for (auto step = steps.begin(); step != steps.end() && status.ok(); ++step) {
    if (step->state.empty()) {
      status = step->run({});
      continue;
    }
    if (const auto resident = residents_.find(step->state[0].raw_data());
        resident != residents_.end()) {
      status = step->run(resident->second.here);
      changed_ = true;
      continue;
    }
    Buffer& buffer = buffer_of(i);
    buffer.filled.Wait();
    status = step->run(here[i]);
    for (size_t k = 0; k < step->state.size(); ++k) {
      out_.Copy(step->state[k].raw_data(), DeviceType::kCpu, here[i][k].raw_data(), device_,
                step->state[k].size_bytes(), &buffer.emptied);
    }
    fetch(i + 2);  // takes the buffer of the copied step before this one
    ++i;
  }
  for (size_t k = 0; k < std::min(i, buffers_.size()); ++k) buffers_[k].emptied.Wait();
  for (Buffer& buffer : buffers_) {
    if (!status.ok()) buffer.filled.Wait();
    buffer.memory = Tensor();
  }
  return status;
}

}  // namespace burst
