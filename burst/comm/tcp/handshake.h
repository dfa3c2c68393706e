// One greeting (greeting.h) on one connection, from its first byte to the proof or the refusal. It
// never waits: rendezvous.h polls many of them side by side.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "burst/comm/tcp/greeting.h"
#include "burst/comm/tcp/socket.h"

namespace burst {

// The identity that this process claims, and the key that proves it.
struct Identity {
  uint64_t job_tag = 0;
  JobKey key = {};
  int rank = 0;
  int world_size = 1;
};

class Handshake {
 public:
  enum class State {
    kGoing,     // call Advance when the socket has one of events()
    kProven,    // the other end has proved that it belongs to the job
    kOtherJob,  // the other end says that it belongs to another job
    kRefused,   // it closed the connection, or sent a wrong greeting or proof
  };

  // `side`: who called. `port`: of the listener. `peer`: the rank that a caller means to reach; a
  // listener learns it.
  Handshake(Socket socket, Side side, uint16_t port, const Identity& self, int peer,
            Deadline deadline);

  // Sends and receives as much as it can without blocking.
  State Advance();

  short events() const;
  const Socket& socket() const { return socket_; }
  Deadline deadline() const { return deadline_; }
  Side side() const { return side_; }

  // Only after kProven: what the other end claims, and the connection. The caller compares the
  // number of ranks in the claim.
  const Claim& claim() const { return theirs_; }
  Socket TakeSocket() { return std::move(socket_); }
  SessionKeys keys() const { return MakeSessionKeys(self_.key, side_, name_, claim_of_caller_); }
  // Returns whether the other end claimed to belong to this job. That proves nothing.
  bool said_job() const { return stage_ == Stage::kClaim; }

 private:
  enum class Stage { kConnecting, kHello, kClaim };

  bool Send(const uint8_t* data, size_t bytes) const;
  bool SendHello() const;
  bool SendClaim();
  // Handles a whole message.
  State Received();
  State ReceivedHello();
  State ReceivedClaim();

  Socket socket_;
  const Side side_;
  const Identity self_;
  const int peer_;
  const Deadline deadline_;
  Stage stage_;
  ConnectionName name_;
  Claim theirs_, claim_of_caller_;
  std::vector<uint8_t> received_;  // the bytes of the expected message
};

}  // namespace burst
