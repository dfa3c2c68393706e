// Parses the three messages of a greeting, and makes the handshake of a process with a peer that
// sends any bytes in any pieces. Without the job's key the process never accepts the peer. A peer
// that knows the key is accepted exactly if it claims to be a rank of this job and speaks to this
// rank.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "burst/base/check.h"
#include "burst/comm/tcp/frame.h"
#include "burst/comm/tcp/greeting.h"
#include "burst/comm/tcp/handshake.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace burst {
namespace {

using State = Handshake::State;

constexpr uint16_t kPort = 1234;

// Checks that a message that was parsed is parsed to the same value after it was written.
template <typename Message, typename Parse>
void CheckMessage(ByteSpan bytes, Parse parse) {
  const absl::StatusOr<Message> message = parse(bytes);
  if (!message.ok()) {
    BURST_CHECK(absl::IsInvalidArgument(message.status())) << message.status().ToString();
    return;
  }
  const auto written = ToBytes(*message);
  const absl::StatusOr<Message> again = parse(written);
  BURST_CHECK(again.ok()) << again.status().ToString();
  BURST_CHECK(ToBytes(*again) == written);
}

void CheckMessages(ByteSpan bytes) {
  for (const size_t size :
       {bytes.size(), kFrameHeaderBytes, kHelloBytes, kClaimBytes, kPlaceBytes}) {
    if (size > bytes.size()) continue;
    const ByteSpan part = bytes.subspan(0, size);
    CheckMessage<FrameHeader>(part, ParseFrameHeader);
    CheckMessage<Hello>(part, ParseHello);
    CheckMessage<Claim>(part, ParseClaim);
    CheckMessage<Place>(part, ParsePlace);
  }
}

struct Ends {
  Socket own;
  int other = -1;

  Ends() {
    int fds[2];
    BURST_CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    own = Socket(fds[0]);
    other = fds[1];
  }
  ~Ends() { close(other); }

  void Send(const void* data, size_t bytes) const {
    BURST_CHECK(send(other, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes) ||
                errno == EPIPE);
  }
  template <size_t n>
  bool Receive(std::array<uint8_t, n>* bytes) const {
    return recv(other, bytes->data(), n, 0) == static_cast<ssize_t>(n);
  }
};

Handshake Begin(Ends* ends, Side side, const Identity& self, int peer) {
  return Handshake(std::move(ends->own), side, kPort, self, peer, Deadline::max());
}

// Sends any bytes in any pieces, without the key.
void BeStrange(FuzzInput* input, Side side, const Identity& self, int peer) {
  Ends ends;
  Handshake handshake = Begin(&ends, side, self, peer);
  State state = side == Side::kCaller ? handshake.Advance() : State::kGoing;
  if (input->Bool()) {  // a good Hello first
    const HelloBytes hello = ToBytes(Hello{self.job_tag, {}});
    ends.Send(hello.data(), hello.size());
    state = handshake.Advance();
    BURST_CHECK(state == State::kGoing);
  }
  while (state == State::kGoing && !input->empty()) {
    const std::string piece = input->Text(100);
    ends.Send(piece.data(), piece.size());
    state = handshake.Advance();
    BURST_CHECK(state != State::kProven) << "believed without a proof";
  }
  if (state == State::kGoing) {
    shutdown(ends.other, SHUT_WR);
    BURST_CHECK(handshake.Advance() == State::kRefused) << "the connection was closed";
  }
}

// Knows the key, and makes any claim.
void BeKnown(FuzzInput* input, Side side, const Identity& self, int peer) {
  Ends ends;
  Handshake handshake = Begin(&ends, side, self, peer);
  const bool calls = side == Side::kCaller;  // the handshake; this end listens
  ConnectionName connection;
  // A process between the two listens on its own port.
  const bool right_port = !input->empty() && input->Integer(0, 7) != 0;
  connection.port = right_port ? kPort : kPort + 1;
  Nonce& own = calls ? connection.listener : connection.caller;
  own = RandomNonce();
  HelloBytes hello = ToBytes(Hello{self.job_tag, own});
  HelloBytes theirs;
  State state = calls ? handshake.Advance() : State::kGoing;
  ends.Send(hello.data(), hello.size());
  state = handshake.Advance();
  BURST_CHECK(state == State::kGoing && ends.Receive(&theirs));
  (calls ? connection.caller : connection.listener) = ParseHello(theirs)->nonce;

  Claim claim;
  claim.rank = static_cast<uint32_t>(input->Integer(0, 9));
  claim.peer = static_cast<uint32_t>(input->Integer(0, 9));
  claim.world_size = static_cast<uint32_t>(input->Integer(0, 9));
  claim.proof = MakeProof(self.key, calls ? Side::kListener : Side::kCaller, connection, claim);
  ClaimBytes bytes = ToBytes(claim);
  const int64_t flipped = input->Integer(0, 2 * kClaimBytes * 8);  // one bit, or none
  const bool intact = flipped >= static_cast<int64_t>(kClaimBytes * 8);
  if (!intact) bytes[flipped / 8] ^= 1 << flipped % 8;
  ends.Send(bytes.data(), bytes.size());
  state = handshake.Advance();
  const bool honest = intact && right_port && claim.rank < claim.world_size &&
                      claim.peer == static_cast<uint32_t>(self.rank) &&
                      (!calls || claim.rank == static_cast<uint32_t>(peer));
  BURST_CHECK_EQ(state == State::kProven, honest)
      << "rank " << claim.rank << " of " << claim.world_size << " speaks to " << claim.peer;
  if (!honest) return;
  BURST_CHECK(handshake.claim().rank == claim.rank);
  Claim of_caller = claim;
  if (calls) {
    ClaimBytes said;
    BURST_CHECK(ends.Receive(&said));
    of_caller = *ParseClaim(said);
  }
  const SessionKeys keys = handshake.keys();
  const SessionKeys others =
      MakeSessionKeys(self.key, calls ? Side::kListener : Side::kCaller, connection, of_caller);
  BURST_CHECK(keys.sends == others.receives && keys.receives == others.sends);
  BURST_CHECK(keys.sends != keys.receives);
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  CheckMessages({data, size});
  FuzzInput input(data, size);
  const Side side = input.Bool() ? Side::kCaller : Side::kListener;
  Identity self;
  self.job_tag = JobTag("job");
  self.key = MakeJobKey("a token that is long enough", "job");
  self.world_size = static_cast<int>(input.Integer(1, 8));
  self.rank = static_cast<int>(input.Integer(0, self.world_size - 1));
  const int peer = static_cast<int>(input.Integer(0, self.world_size - 1));
  if (input.Bool()) {
    BeKnown(&input, side, self, peer);
  } else {
    BeStrange(&input, side, self, peer);
  }
}

}  // namespace burst
