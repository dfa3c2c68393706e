#include "burst/base/progress.h"

#include <algorithm>
#include <mutex>

namespace burst {
namespace {

// The ranks of this process, and the counts of ranks that have ended.
struct Ranks {
  std::mutex mutex;
  std::vector<const RankProgress*> live;
  uint64_t ended = 0;
};

std::atomic<bool> watched{false};

Ranks& AllRanks() {
  static Ranks* ranks = new Ranks;
  return *ranks;
}

}  // namespace

std::string Describe(const ProgressPlace& place) {
  std::string text;
  if (place.step >= 0) text += "step " + std::to_string(place.step) + ", ";
  text += place.phase;
  if (place.layer >= 0) text += ", layer " + std::to_string(place.layer);
  if (place.op != nullptr) text += std::string(", ") + place.op;
  return text;
}

void RankProgress::Reach(const ProgressPlace& place) {
  place_ = place;
  if (listener_ != nullptr) listener_->Reached(place);
  step_.store(place.step, kRelaxed);
  phase_.store(place.phase, kRelaxed);
  layer_.store(place.layer, kRelaxed);
  op_.store(place.op, kRelaxed);
  Event();
}

void RankProgress::Wait(const char* what, const char* channel, int peer, int64_t bytes) {
  channel_.store(channel, kRelaxed);
  peer_.store(peer, kRelaxed);
  bytes_.store(bytes, kRelaxed);
  wait_.store(what, kRelaxed);
  Event();
}

// Takes the lock, so that nobody reads the marks of the earlier device. Their count is kept.
void RankProgress::set_device(DeviceMarks* device) {
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  const DeviceMarks* const before = device_.load();
  if (before != nullptr) ranks.ended += before->reached() + 1;
  device_.store(device);
}

uint64_t RankProgress::events() const {
  const DeviceMarks* const device = device_.load();
  return events_.load(kRelaxed) + (device == nullptr ? 0 : device->reached());
}

std::string RankProgress::Describe() const {
  ProgressPlace place;
  place.step = step_.load(kRelaxed);
  place.phase = phase_.load(kRelaxed);
  place.layer = layer_.load(kRelaxed);
  place.op = op_.load(kRelaxed);
  std::string text = "rank " + std::to_string(rank_) + ": " + burst::Describe(place) + ": ";
  const char* const wait = wait_.load(kRelaxed);
  if (wait == nullptr) {
    text += "computes";
  } else {
    text += wait;
    const int peer = peer_.load(kRelaxed);
    if (const int64_t bytes = bytes_.load(kRelaxed); bytes > 0) {
      text += " " + std::to_string(bytes) + " bytes";
    }
    if (peer >= 0) {
      text += std::string(wait[0] == 'r'   ? " from"
                          : wait[0] == 's' ? " to"
                                           : "") +
              " rank " + std::to_string(peer);
    }
    if (const char* channel = channel_.load(kRelaxed); channel != nullptr) {
      text += std::string(", channel ") + channel;
    }
  }
  if (const DeviceMarks* device = device_.load(); device != nullptr) {
    const std::string unfinished = device->Describe();
    text += "; GPU: " + (unfinished.empty() ? "has finished all it was given" : unfinished);
  }
  return text;
}

ScopedRankProgress::ScopedRankProgress(int rank) : outer_(current_progress), progress_(rank) {
  current_progress = &progress_;
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  ranks.live.push_back(&progress_);
}

ScopedRankProgress::~ScopedRankProgress() {
  current_progress = outer_;
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  ranks.ended += progress_.events() + 1;
  ranks.live.erase(std::find(ranks.live.begin(), ranks.live.end(), &progress_));
}

ScopedUnwatched::ScopedUnwatched() : rank_(current_progress) {
  if (rank_ == nullptr) return;
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  ranks.live.erase(std::find(ranks.live.begin(), ranks.live.end(), rank_));
}

ScopedUnwatched::~ScopedUnwatched() {
  if (rank_ == nullptr) return;
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  ranks.live.push_back(rank_);
}

uint64_t CountProgress() {
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  uint64_t count = ranks.ended;
  for (const RankProgress* rank : ranks.live) count += rank->events();
  return count;
}

int RanksInProgress() {
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  return static_cast<int>(ranks.live.size());
}

std::vector<std::string> DescribeProgress() {
  Ranks& ranks = AllRanks();
  std::lock_guard<std::mutex> lock(ranks.mutex);
  std::vector<const RankProgress*> sorted = ranks.live;
  std::sort(sorted.begin(), sorted.end(),
            [](const RankProgress* a, const RankProgress* b) { return a->rank() < b->rank(); });
  std::vector<std::string> lines;
  for (const RankProgress* rank : sorted) lines.push_back(rank->Describe());
  return lines;
}

bool ProgressIsWatched() { return watched.load(); }
void SetProgressIsWatched(bool is) { watched.store(is); }

void ReachStep(int64_t step) {
  if (current_progress == nullptr) return;
  ProgressPlace place = current_progress->place();
  place.step = step;
  current_progress->Reach(place);
}

ScopedPhase::ScopedPhase(const char* phase) {
  if (current_progress == nullptr) return;
  outer_ = current_progress->place();
  ProgressPlace place = outer_;
  place.phase = phase;
  place.layer = -1;
  place.op = nullptr;
  current_progress->Reach(place);
}

ScopedPhase::~ScopedPhase() {
  if (current_progress == nullptr) return;
  outer_.step = current_progress->place().step;
  current_progress->Reach(outer_);
}

}  // namespace burst
