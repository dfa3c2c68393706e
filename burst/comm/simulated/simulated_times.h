// The times that ranks with simulated GPUs tell each other: from when on a sender has its message,
// and when each rank came to a collective. For simulated_communicator.cc.
//
// What is said waits for its reader, and nobody waits for that. So a rank runs ahead until it needs
// a time that is not there yet: a thread stops rarely, and a simulation costs little more than its
// ranks' own work.
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
  double time = 0;  // s: the sender has it from then on
  int64_t bytes = 0;
};

// The times of all ranks; all their threads may call it. Ranks below are numbered in the world.
class SimulatedTimes {
 public:
  // The ranks of a communicator, and what they have said and not all read.
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
  // The next message; false if the sender has left, or a rank failed.
  bool Receive(Group& group, int channel, int from, int to, SentMessage* message);

  // This rank comes to the group's collective of that number.
  void Come(Group& group, int64_t number, double time);
  // When the last rank came to it; once for each rank. False as above.
  bool AwaitAll(Group& group, int64_t number, int rank, double* last);

  // The rank says nothing more.
  void Leave(int rank);
  void Fail();

 private:
  struct Rank {
    std::condition_variable woken;
    const void* awaited = nullptr;  // what it waits for: of a group, messages or a collective
    bool left = false;
  };

  // Until the condition on what is awaited holds (true), or cannot any more because one of `needed`
  // has left.
  template <typename Condition>
  bool Await(std::unique_lock<std::mutex>& lock, int rank, const void* awaited,
             const std::vector<int>& needed, const Condition& condition);

  std::mutex mutex_;  // guards all below, and groups
  std::vector<Rank> ranks_;
  bool failed_ = false;
  std::map<std::tuple<const Group*, int64_t, int>, std::shared_ptr<Group>> groups_;
};

}  // namespace burst
