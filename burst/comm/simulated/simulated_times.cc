#include "burst/comm/simulated/simulated_times.h"

#include <algorithm>

namespace burst {

std::shared_ptr<SimulatedTimes::Group> SimulatedTimes::MakeGroup(const Group* parent,
                                                                 int64_t number, int color,
                                                                 const std::vector<int>& ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Group>& group = groups_[{parent, number, color}];
  if (group == nullptr) {
    group = std::make_shared<Group>();
    group->ranks = ranks;
  }
  return group;
}

void SimulatedTimes::Send(Group& group, int channel, int from, int to, const SentMessage& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::deque<SentMessage>& messages = group.messages[{channel, from, to}];
  messages.push_back(message);
  if (ranks_[to].awaited != &messages) return;
  lock.unlock();  // otherwise the woken thread would wait for the lock
  ranks_[to].woken.notify_one();
}

bool SimulatedTimes::Receive(Group& group, int channel, int from, int to, SentMessage* message) {
  std::unique_lock<std::mutex> lock(mutex_);
  std::deque<SentMessage>& messages = group.messages[{channel, from, to}];
  if (!Await(lock, to, &messages, {from}, [&] { return !messages.empty(); })) return false;
  *message = messages.front();
  messages.pop_front();
  return true;
}

void SimulatedTimes::Come(Group& group, int64_t number, double time) {
  std::lock_guard<std::mutex> lock(mutex_);
  Group::Collective& collective = group.collectives[number];
  collective.last = std::max(collective.last, time);
  if (++collective.came < group.ranks.size()) return;
  for (const int rank : group.ranks) {
    if (ranks_[rank].awaited == &collective) ranks_[rank].woken.notify_one();
  }
}

bool SimulatedTimes::AwaitAll(Group& group, int64_t number, int rank, double* last) {
  std::unique_lock<std::mutex> lock(mutex_);
  Group::Collective& collective = group.collectives[number];
  const auto all = [&] { return collective.came == group.ranks.size(); };
  if (!Await(lock, rank, &collective, group.ranks, all)) return false;
  *last = collective.last;
  if (++collective.read == group.ranks.size()) group.collectives.erase(number);
  return true;
}

void SimulatedTimes::Leave(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].left = true;
  for (Rank& other : ranks_) other.woken.notify_one();
}

void SimulatedTimes::Fail() {
  std::lock_guard<std::mutex> lock(mutex_);
  failed_ = true;
  for (Rank& rank : ranks_) rank.woken.notify_one();
}

template <typename Condition>
bool SimulatedTimes::Await(std::unique_lock<std::mutex>& lock, int rank, const void* awaited,
                           const std::vector<int>& needed, const Condition& condition) {
  Rank& self = ranks_[rank];
  const auto left = [&](int other) { return ranks_[other].left; };
  while (!condition()) {
    if (failed_ || std::any_of(needed.begin(), needed.end(), left)) return false;
    self.awaited = awaited;
    self.woken.wait(lock);
    self.awaited = nullptr;
  }
  return true;
}

}  // namespace burst
