// Carries messages between GPUs of processes on one host, without a kernel that waits. The sender's
// copy engine writes a message piece by piece (mail_pieces.h) into a mailbox in the receiver's
// memory, which CUDA IPC maps into the sender's process. Flags in GPU memory order both streams:
//
//   the sender's stream                               the receiver's stream
//   waits until the receiver has freed the slot
//   copies a piece into the slot
//   writes the piece's number as "arrived"      -->   waits for the number
//                                                     copies the piece to where it belongs
//   (waits for it before the next use)          <--   writes the number as "freed"
//
// A stream's write follows a fence of the whole system for the stream's earlier work. So whoever
// sees a number also sees the piece, or may overwrite it. No host waits for another host or GPU.
// For gpu_rank.cc.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/failure.h"
#include "burst/comm/gpu/mail_pieces.h"
#include "burst/device/progress.h"
#include "burst/device/stream_words.h"

namespace burst {

class PeerMail;

// All PeerMails of this process, so that a failure can end their waits. Thread-safe.
class PeerMails {
 public:
  explicit PeerMails(const FailureState* failure) : failure_(failure) {}

  // Ends the streams' waits for flags, and returns when the streams are idle. Call it after the
  // failure is set.
  void Free();

 private:
  friend class PeerMail;

  const FailureState* const failure_;
  std::mutex mutex_;
  std::set<PeerMail*> mails_;
};

// One rank's side of a communicator. Belongs to the rank's thread.
class PeerMail {
 public:
  // The memory of a rank's mailboxes, all together. At 2 ranks a mailbox holds 32 MiB.
  static constexpr int64_t kMailBytes = int64_t{64} << 20;
  // The longest message. Longer ones take longer than by NCCL, because of the copy out of the
  // mailbox (benchmarks/results/ring_messages_2_h200.json).
  static constexpr int64_t kMostBytes = int64_t{16} << 20;

  // Collective; `host` connects the same ranks. Null on all ranks if one of them cannot map
  // another's memory, uses another host, or has no BURST_IPC=1 in its environment. InvalidArgument
  // for other values than 0 and 1. `mails` must outlive the object.
  static absl::StatusOr<std::unique_ptr<PeerMail>> Create(Communicator* host, PeerMails* mails);
  // Waits until the receivers have copied out what this rank sent, unless there was a failure.
  ~PeerMail();

  // Whether messages of `bytes` bytes from one rank to another go by mail. Both ranks agree.
  bool Takes(Channel channel, int from, int to, int64_t bytes) const;
  // As Communicator::Post, for messages that the mail takes.
  absl::Status Post(Channel channel, absl::Span<const SendBuffer> sends,
                    absl::Span<const ReceiveBuffer> receives);
  // Whether messages were posted on the channel since the last Join.
  bool has_posted(Channel channel) const {
    return static_cast<int>(channel) < kChannels && posted_[static_cast<int>(channel)];
  }
  // Makes the thread's stream wait for all messages posted on the channel.
  void Join(Channel channel);

 private:
  friend class PeerMails;

  static constexpr int kChannels = 2;  // those of rings: kRead and kGradient
  static constexpr size_t kMostLines = 3;
  enum Flag { kArrived, kFreed, kNumFlags };

  // The messages to or from one rank on one channel.
  struct Flow {
    std::atomic<cudaStream_t> stream{nullptr};  // made at the first message
    cudaEvent_t done = nullptr;
    std::unique_ptr<MessageMarks> marks;
    char* slots = nullptr;                     // the receiver's
    const volatile uint32_t* waits = nullptr;  // this rank's flag
    volatile uint32_t* writes = nullptr;       // the other rank's flag
    std::atomic<uint32_t> last{0};             // the number of the last piece
    int64_t post = 0;                          // the last Post with a piece
    bool posted = false;                       // since the last Join
  };
  // A distance between ranks: a rank sends to one rank on each line, and receives from one.
  struct Line {
    int distance = 0;
    std::array<Flow, kChannels> sends, receives;
  };

  PeerMail(Communicator* host, PeerMails* mails);
  bool Allocate(cudaIpcMemHandle_t* handle);
  bool Map(const std::vector<cudaIpcMemHandle_t>& handles);
  bool Try();
  void Register();
  int64_t piece_bytes() const;
  // Where a flag, or the first slot of a mailbox, is in a rank's memory.
  volatile uint32_t* FlagIn(char* memory, Flag flag, int channel, size_t line) const;
  char* SlotsIn(char* memory, int channel, size_t line) const;
  int LineOf(int from, int to) const;  // -1: none
  void Begin(Channel channel, Flow* flow);
  absl::Status Queue(Flow* flow, const MailPiece& piece, uint32_t until, void* to,
                     const void* from);
  void JoinFlow(Flow* flow);
  template <typename Function>
  void ForEachFlow(Function function);
  // Any thread. Satisfies all waits for flags. Returns whether no stream has work left.
  bool EndWaits();
  void Free();

  Communicator* const host_;
  PeerMails* const mails_;
  const int device_, rank_, size_;
  const cuda::StreamWords words_;
  cudaStream_t freeing_ = nullptr;  // ends waits after a failure
  char* memory_ = nullptr;          // this rank's flags and mailboxes
  std::map<int, char*> mapped_;     // the other ranks' memory
  std::vector<Line> lines_;
  std::vector<MailPieces> pieces_;  // by channel
  std::array<bool, kChannels> posted_ = {};
  int64_t posts_ = 0;
};

}  // namespace burst
