// The clocks of ranks with simulated GPUs, and the events that move them. For
// simulated_communicator.cc.
//
// A rank's thread writes its events down: kernels, messages and waits. It hands them in by the
// thousands. Then the events of all ranks happen, as far as the messages that they wait for were
// sent. A thread stops only where it reads its clock, or where it is far ahead of other ranks. So a
// simulation costs little more than its ranks' own work.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "burst/comm/communicator.h"

namespace burst {

// The clocks of all ranks; all their threads may call it. Ranks below are numbered in the world.
class SimulatedTimes {
 public:
  // The messages of one rank to another that are not received yet.
  class Box {
    friend class SimulatedTimes;
    struct Message {
      double time = 0;  // s: when the sender has it
      int64_t bytes = 0;
    };
    explicit Box(int sender) : from(sender) {}

    const int from;
    int reader = -1;  // the rank that waits for the next message; -1: none
    std::deque<Message> messages;
  };

  // The ranks of a communicator.
  class Group {
    friend class SimulatedTimes;
    struct Collective {
      size_t came = 0, read = 0;  // ranks
      double last = 0;            // s
      std::vector<int> readers;   // the ranks that wait for it
    };
    std::vector<int> ranks;
    std::map<std::tuple<int, int, int>, Box> boxes;  // by channel, from, to
    std::map<int64_t, Collective> collectives;       // by number, until all ranks have read them
  };

  // A rank's transfers in a group.
  class Member {
    friend class SimulatedTimes;
    struct Transfer {
      double begin = 0;  // when all that it needs was ready, so far
      double seconds = 0;
      absl::InlinedVector<std::pair<Box*, int64_t>, 4> receives;  // with their bytes
      size_t received = 0;                                        // number of them, from the first
      int64_t collective = -1;                                    // its number; -1: none
    };
    struct OfChannel {
      std::vector<Transfer> transfers;  // posted, in order
      size_t next = 0;                  // the first that has not arrived
      double arrived = 0;               // when the channel's last transfer arrived
    };
    explicit Member(Group* of) : group(of) {}

    Group* const group;
    std::array<OfChannel, kNumChannels> channels;
  };

  // What a rank does next.
  struct Event {
    enum class Kind {
      kKernel,      // computes for `seconds`
      kWaitUntil,   // waits until `seconds` on the clock
      kSend,        // sends `number` bytes to `box`
      kTransfer,    // posts a transfer that takes `seconds` on the links
      kReceive,     // adds to the posted transfer a message of `number` bytes from `box`
      kCollective,  // posts collective `number`, which takes `seconds` on the links
      kWait,        // waits for all that is posted on the channel
    };
    Kind kind;
    double seconds = 0;
    int64_t number = 0;
    Channel channel = Channel::kRead;
    Member* member = nullptr;  // whose channel it is
    Box* box = nullptr;
  };

  // `message_seconds`: the time of the shortest message.
  SimulatedTimes(int ranks, double message_seconds)
      : message_seconds_(message_seconds), ranks_(ranks) {}

  // Returns one group for all ranks that give the same parent (null: none), number and color.
  Group* MakeGroup(const Group* parent, int64_t number, int color, const std::vector<int>& ranks);
  Member* MakeMember(Group* group);
  Box* BoxOf(Group* group, Channel channel, int from, int to);

  // Hands in the rank's next events, and waits until at most `most_left` of its events are left.
  // Unavailable if a rank failed or left too early; InvalidArgument for a message that does not fit
  // its buffer.
  absl::Status HandIn(int rank, std::vector<Event>* events, size_t most_left);
  // Returns the rank's clock after the events that have happened, in seconds.
  double Now(int rank);

  // Records that the rank hands in nothing more.
  void Leave(int rank);
  void Fail();

 private:
  struct Rank {
    double now = 0;
    size_t left() const { return events.size() - next; }

    std::vector<Event> events;
    size_t next = 0;               // the first event that has not happened
    absl::Status status;           // an error of the events so far
    const Box* box = nullptr;      // whose message the next event waits for
    const Group* group = nullptr;  // whose ranks it waits for
    bool ended = false;
    bool stopped = false;  // its thread is in HandIn
    size_t most_left = 0;
    std::condition_variable woken;
  };

  // Lets events happen, from those of `rank` on, as far as they can.
  void Run(int rank);
  // Returns false if the event has to wait.
  bool Happen(int rank, const Event& event);
  bool ReceiveAll(int rank, Member::Transfer* transfer);
  bool MeetAll(int rank, Group* group, Member::Transfer* transfer);
  // Fails a rank that waits for one that has left.
  void CheckAwaited(Rank* rank);

  const double message_seconds_;
  std::mutex mutex_;  // guards all below, and groups and members
  std::vector<Rank> ranks_;
  std::vector<int> ready_;  // ranks whose events may go on
  bool failed_ = false, any_ended_ = false;
  std::map<std::tuple<const Group*, int64_t, int>, std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<Member>> members_;
};

}  // namespace burst
