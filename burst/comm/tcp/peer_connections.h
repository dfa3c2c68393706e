// The connections of a process with all ranks of the job, shared by all of its groups. They carry
// frames (frame.h) and heartbeats, and notice lost ranks.
//
// One thread serves them and sends and receives while the rank computes. A long message goes from
// the sender's buffer to the socket and from the socket into the receiver's buffer, without a copy
// in between. Short messages are copied on both sides. Messages that a rank sends before they are
// expected have a limit in bytes.
//
// If a connection has a seal (link.h), a frame is one record for its header and, if it has a
// payload, one for the payload. The sender then seals a long message piece by piece into a buffer,
// and the receiver opens it in place.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/tcp/frame.h"
#include "burst/comm/tcp/link.h"

namespace burst {

struct TcpOptions {
  // Every rank sends something at least once per `heartbeat`; a rank that sends nothing for
  // `lost_after` is lost.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(2);
  std::chrono::milliseconds lost_after = std::chrono::seconds(20);
  // Called once when a rank was lost or gave up, on the thread that serves the connections. By then
  // the other ranks were told and waiting calls have returned. It is called `grace` later, unless
  // this rank gives up or leaves before. The status is Unavailable: "rank 2 of 4 was lost: ...",
  // "rank 1 of 4 gave up: ...".
  std::function<void(const absl::Status& failure)> on_failure;
  std::chrono::milliseconds grace{0};
  // For a library inside of another program: false, and GiveUp only ends the job, not the process.
  bool ends_process = true;
  // How long a Wait waits for a rank that is alive, before it ends the job; 0: for ever.
  std::chrono::milliseconds patience{0};
  // The most bytes that messages of one rank may cost while this rank does not wait for them yet.
  // More than that ends the job.
  uint64_t unexpected_bytes = uint64_t{1} << 30;
};

// A message that was posted. It stays where it is until it is done or cancelled.
struct Transfer {
  bool sends;
  uint64_t group;
  int channel;
  int peer;  // a rank of the world
  char* data;
  int64_t bytes;

  // For PeerConnections.
  int64_t moved = 0;  // bytes of a long message that were sent or received
  bool done = false;
  int64_t wrong_bytes = -1;  // the length that the peer sent instead of `bytes`
};

class PeerConnections {
 public:
  // `links`: with every rank, in order of rank.
  PeerConnections(int rank, std::vector<PeerLink> links, const TcpOptions& options);
  ~PeerConnections();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  uint64_t NewGroup() { return uint64_t(rank_) << 32 | ++groups_; }

  // Messages of one group and channel between two ranks arrive in the order in which they were
  // started. Returns the failure of the job, if it has failed.
  absl::Status Start(Transfer* transfer);
  // Waits until the buffer is free, because the message has arrived or was taken.
  // Unavailable if the job has failed; NotFound if the peer has finished without it.
  absl::Status Wait(const Transfer& transfer);
  // Cancels a message. Its buffer is free on return. In the middle of a message to a
  // rank that has not finished, this is a failure of the job.
  void Cancel(Transfer* transfer);

  // Ends the job: tells the others that this rank gave up, unless another rank failed before. Then
  // ends the process (TcpOptions::ends_process).
  void GiveUp(const absl::Status& reason);

 private:
  // A frame that leaves: `head` holds the header and, of short and sealed ones, the payload.
  struct Outgoing {
    std::string head;
    const char* tail = nullptr;  // a piece of a transfer's buffer
    size_t tail_bytes = 0;
    Transfer* transfer = nullptr;
    bool is_last = false;  // whether it is the transfer's last piece
    size_t written = 0;
    size_t size() const { return head.size() + tail_bytes; }
    void Own();  // copies the tail, which is no longer in use then
  };

  struct Peer {
    Socket socket;  // closed once nothing more can arrive
    std::optional<Seal> seal;
    // To the peer.
    std::deque<Outgoing> outgoing;  // short frames; the first one may have left in part
    std::map<std::tuple<uint64_t, int>, std::deque<Transfer*>> announced;  // wait for a kGo
    std::array<std::deque<Transfer*>, kNumChannels> sending;
    int last_channel = 0;  // the channel of the piece that was sent last
    // From the peer. Bytes [begin, end) of the buffer are read but not used yet.
    std::vector<uint8_t> buffer;
    size_t begin = 0, end = 0;
    std::optional<FrameHeader> frame;  // the header of the payload that comes
    uint64_t payload_read = 0;
    bool dropped = false;      // a part of it is gone, and nobody needs the rest
    std::string payload;       // for a frame without a transfer's buffer
    Transfer* into = nullptr;  // the transfer that a piece belongs to
    std::array<std::deque<Transfer*>, kNumChannels> coming;  // kGo was sent
    uint64_t unexpected_bytes = 0;                           // messages that nobody waits for
    std::chrono::steady_clock::time_point heard;
    bool finished = false;  // it said so
    bool garbled = false;   // it broke the rules: what it sends is dropped
  };

  // A message that has come, or was announced, before its receive was started.
  struct Arrived {
    std::string payload;
    uint64_t bytes;
    bool announced;
  };
  using Key = std::tuple<uint64_t, int, int>;  // group, channel, source
  // Lists: an empty one takes no memory, and a peer decides how many streams there are.
  struct Stream {
    std::list<Transfer*> posted;
    std::list<Arrived> arrived;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Below, the lock is held.
  void Queue(int peer, FrameKind kind, int channel, uint64_t group, uint64_t bytes,
             absl::string_view payload);
  void QueueForAll(FrameKind kind, absl::string_view payload);
  void SetFailure(const absl::Status& failure);
  std::string Sealed(Peer* peer, const FrameHeader& header, absl::string_view payload) const;
  static void DropPayload(Peer* peer);
  void DropTransfers();
  void CloseAll();
  void Lose(int peer, const std::string& how);
  void Arrive(const Key& key, Arrived message);
  void Match(const Key& key);
  bool HasOutput(const Peer& peer) const;
  bool NextPiece(Peer* peer);
  void WriteTo(int peer);
  void ReadFrom(int peer);
  absl::Status UseBuffer(int peer);
  // Returns whether the whole record in the buffer, up to its tag, is authentic.
  static absl::Status OpenRecord(Peer* peer, void* data, size_t bytes, const uint8_t* tag);
  absl::Status BeginPayload(int peer);
  absl::Status Dispatch(int peer);
  void CheckHeartbeats();
  bool Flushed() const;
  bool AllClosed() const;

  void Run();
  void Serve(const std::function<void()>& serve);
  void RunOnce(Lock& lock, std::chrono::milliseconds timeout);
  void SayFarewell(Lock& lock);
  void WakeThread();
  std::string Who(int peer) const;

  const int rank_;
  const TcpOptions options_;
  const absl::Status no_memory_;  // made while there is some
  uint64_t groups_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;  // in order of rank; the own one is empty
  std::map<Key, Stream> streams_;
  absl::Status failure_;
  bool ending_ = false;  // this process gave up itself: on_failure is not called
  bool stopping_ = false;
  std::chrono::steady_clock::time_point said_, looked_;  // last heartbeat, last check of the others

  Socket wake_;  // an eventfd
  std::vector<pollfd> polled_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace burst
