#include "burst/comm/simulated/simulated_times.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace burst {

SimulatedTimes::Group* SimulatedTimes::MakeGroup(const Group* parent, int64_t number, int color,
                                                 const std::vector<int>& ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<Group>& group = groups_[{parent, number, color}];
  if (group == nullptr) {
    group = std::make_unique<Group>();
    group->ranks = ranks;
  }
  return group.get();
}

SimulatedTimes::Member* SimulatedTimes::MakeMember(Group* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  members_.push_back(std::unique_ptr<Member>(new Member(group)));
  return members_.back().get();
}

SimulatedTimes::Box* SimulatedTimes::BoxOf(Group* group, Channel channel, int from, int to) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::tuple<int, int, int> key = {static_cast<int>(channel), from, to};
  const auto found = group->boxes.find(key);
  if (found != group->boxes.end()) return &found->second;
  return &group->boxes.emplace(key, Box(from)).first->second;
}

absl::Status SimulatedTimes::HandIn(int rank, std::vector<Event>* events, size_t most_left) {
  std::unique_lock<std::mutex> lock(mutex_);
  Rank& self = ranks_[rank];
  if (self.left() == 0) {
    self.events.swap(*events);
    self.next = 0;
    Run(rank);
  } else {  // the first of them waits for another rank's
    self.events.erase(self.events.begin(), self.events.begin() + self.next);
    self.next = 0;
    self.events.insert(self.events.end(), events->begin(), events->end());
  }
  events->clear();
  self.most_left = most_left;
  self.stopped = true;
  self.woken.wait(lock, [&] { return failed_ || !self.status.ok() || self.left() <= most_left; });
  self.stopped = false;
  return failed_ ? absl::UnavailableError("another rank failed") : self.status;
}

double SimulatedTimes::Now(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ranks_[rank].now;
}

void SimulatedTimes::Leave(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  ranks_[rank].ended = any_ended_ = true;
  for (Rank& other : ranks_) CheckAwaited(&other);
}

void SimulatedTimes::Fail() {
  std::lock_guard<std::mutex> lock(mutex_);
  failed_ = true;
  for (Rank& rank : ranks_) rank.woken.notify_one();
}

void SimulatedTimes::CheckAwaited(Rank* rank) {
  const auto ended = [&](int other) { return ranks_[other].ended; };
  const bool alone = (rank->box != nullptr && ended(rank->box->from)) ||
                     (rank->group != nullptr &&
                      std::any_of(rank->group->ranks.begin(), rank->group->ranks.end(), ended));
  if (!alone || !rank->status.ok()) return;
  rank->status = absl::UnavailableError("another rank ended before its message");
  rank->woken.notify_one();
}

void SimulatedTimes::Run(int rank) {
  ready_.push_back(rank);
  while (!ready_.empty()) {
    const int next = ready_.back();
    ready_.pop_back();
    Rank& self = ranks_[next];
    self.box = nullptr;
    self.group = nullptr;
    while (self.status.ok() && self.left() > 0 && Happen(next, self.events[self.next])) {
      ++self.next;
    }
    if (any_ended_) CheckAwaited(&self);
    const bool done = self.left() <= self.most_left || !self.status.ok();
    if (self.stopped && done) self.woken.notify_one();
  }
}

bool SimulatedTimes::Happen(int rank, const Event& event) {
  using Kind = Event::Kind;
  Rank& self = ranks_[rank];
  const auto c = static_cast<size_t>(event.channel);
  switch (event.kind) {
    case Kind::kKernel:
      self.now += event.seconds;
      return true;
    case Kind::kWaitUntil:
      self.now = std::max(self.now, event.seconds);
      return true;
    case Kind::kSend:
      event.box->messages.push_back({self.now, event.number});
      if (event.box->reader >= 0) ready_.push_back(std::exchange(event.box->reader, -1));
      return true;
    case Kind::kTransfer:
      event.member->channels[c].transfers.push_back({self.now, event.seconds, {}, 0, -1});
      return true;
    case Kind::kReceive:
      event.member->channels[c].transfers.back().receives.push_back({event.box, event.number});
      return true;
    case Kind::kCollective: {
      event.member->channels[c].transfers.push_back({self.now, event.seconds, {}, 0, event.number});
      Group& group = *event.member->group;
      Group::Collective& collective = group.collectives[event.number];
      collective.last = std::max(collective.last, self.now);
      if (++collective.came < group.ranks.size()) return true;
      ready_.insert(ready_.end(), collective.readers.begin(), collective.readers.end());
      return true;
    }
    case Kind::kWait:
      break;
  }
  Member::OfChannel& channel = event.member->channels[c];
  for (; channel.next < channel.transfers.size(); ++channel.next) {
    Member::Transfer& transfer = channel.transfers[channel.next];
    if (!ReceiveAll(rank, &transfer)) return false;
    if (transfer.collective >= 0 && !MeetAll(rank, event.member->group, &transfer)) return false;
    channel.arrived =
        std::max(transfer.begin, channel.arrived) + message_seconds_ + transfer.seconds;
  }
  channel.transfers.clear();
  channel.next = 0;
  self.now = std::max(self.now, channel.arrived);
  return true;
}

bool SimulatedTimes::ReceiveAll(int rank, Member::Transfer* transfer) {
  for (; transfer->received < transfer->receives.size(); ++transfer->received) {
    const auto& [box, bytes] = transfer->receives[transfer->received];
    if (box->messages.empty()) {
      box->reader = rank;
      ranks_[rank].box = box;
      return false;
    }
    const Box::Message message = box->messages.front();
    box->messages.pop_front();
    if (message.bytes != bytes) {
      ranks_[rank].status = absl::InvalidArgumentError(absl::StrCat(
          "rank ", box->from, " sends ", message.bytes, " bytes to a buffer of ", bytes));
      return false;
    }
    transfer->begin = std::max(transfer->begin, message.time);
  }
  return true;
}

bool SimulatedTimes::MeetAll(int rank, Group* group, Member::Transfer* transfer) {
  Group::Collective& collective = group->collectives[transfer->collective];
  if (collective.came < group->ranks.size()) {
    collective.readers.push_back(rank);
    ranks_[rank].group = group;
    return false;
  }
  transfer->begin = std::max(transfer->begin, collective.last);
  if (++collective.read == group->ranks.size()) group->collectives.erase(transfer->collective);
  return true;
}

}  // namespace burst
