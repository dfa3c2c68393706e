// The times that ranks with simulated GPUs exchange: when a sender has its message, and when each
// rank reached a collective. For simulated_communicator.cc.
//
// A posted time is queued until it is read, and the poster never blocks. So a rank runs ahead until
// it needs a time that is not there yet. Threads stop rarely, and a simulation costs little more
// than its ranks' own work.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace burst {

struct SentMessage {
  double time = 0;  // s: when the sender has it
  int64_t bytes = 0;
};

// The times of all ranks; all their threads may call it. Ranks below are numbered in the world.
class SimulatedTimes {
 public:
  // The ranks of a communicator, and the posted times that not all of them have read.
  class Group {
   private:
    friend class SimulatedTimes;
    struct Collective {
      size_t came = 0, read = 0;  // ranks
      double last = 0;            // s
    };
    std::vector<int> ranks;
    std::map<std::tuple<int, int, int>, std::deque<SentMessage>> messages;  // by channel, from, to
    std::map<int64_t, Collective> collectives;                              // by number
  };

  explicit SimulatedTimes(int ranks) : ranks_(ranks) {}

  // Returns one group for all ranks that give the same parent (null: none), number and color.
  std::shared_ptr<Group> MakeGroup(const Group* parent, int64_t number, int color,
                                   const std::vector<int>& ranks);

  void Send(Group& group, int channel, int from, int to, const SentMessage& message);
  // Reads the next message. False if the sender has left, or a rank failed.
  bool Receive(Group& group, int channel, int from, int to, SentMessage* message);

  // Posts that this rank has reached the group's collective of that number.
  void Come(Group& group, int64_t number, double time);
  // Waits until all ranks have reached the collective; `last` becomes the time of the last one.
  // Once for each rank. False as above.
  bool AwaitAll(Group& group, int64_t number, int rank, double* last);

  // Records that the rank posts nothing more.
  void Leave(int rank);
  void Fail();

 private:
  struct Rank {
    std::condition_variable woken;
    const void* awaited = nullptr;  // a group's messages or collective that it waits for
    bool left = false;
  };

  // Waits until the condition on the awaited object holds (true), or cannot hold any more because
  // one of `needed` has left (false).
  template <typename Condition>
  bool Await(std::unique_lock<std::mutex>& lock, int rank, const void* awaited,
             const std::vector<int>& needed, const Condition& condition);

  std::mutex mutex_;  // guards all below, and groups
  std::vector<Rank> ranks_;
  bool failed_ = false;
  std::map<std::tuple<const Group*, int64_t, int>, std::shared_ptr<Group>> groups_;
};

}  // namespace burst
