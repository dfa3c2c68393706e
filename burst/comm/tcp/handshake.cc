#include "burst/comm/tcp/handshake.h"

#include <poll.h>

#include <cerrno>
#include <utility>

namespace burst {

Handshake::Handshake(Socket socket, Side side, uint16_t port, const Identity& self, int peer,
                     Deadline deadline)
    : socket_(std::move(socket)),
      side_(side),
      self_(self),
      peer_(peer),
      deadline_(deadline),
      stage_(side == Side::kCaller ? Stage::kConnecting : Stage::kHello) {
  name_.port = port;
  (side == Side::kCaller ? name_.caller : name_.listener) = RandomNonce();
}

short Handshake::events() const { return stage_ == Stage::kConnecting ? POLLOUT : POLLIN; }

// Sends a message of a greeting. It must fit into the buffer of a new connection.
bool Handshake::Send(const uint8_t* data, size_t bytes) const {
  return send(socket_.fd(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

bool Handshake::SendHello() const {
  const Nonce& own = side_ == Side::kCaller ? name_.caller : name_.listener;
  const HelloBytes bytes = ToBytes(Hello{self_.job_tag, own});
  return Send(bytes.data(), bytes.size());
}

bool Handshake::SendClaim() {
  const bool calls = side_ == Side::kCaller;
  Claim claim;
  claim.rank = self_.rank;
  claim.peer = calls ? peer_ : theirs_.rank;
  claim.world_size = self_.world_size;
  claim.proof = MakeProof(self_.key, side_, name_, claim);
  if (calls) claim_of_caller_ = claim;
  const ClaimBytes bytes = ToBytes(claim);
  return Send(bytes.data(), bytes.size());
}

Handshake::State Handshake::Advance() {
  if (stage_ == Stage::kConnecting) {
    if (!socket_.ConnectResult().ok() || !SendHello()) return State::kRefused;
    stage_ = Stage::kHello;
  }
  while (true) {
    const size_t whole = stage_ == Stage::kHello ? kHelloBytes : kClaimBytes;
    const size_t had = received_.size();
    received_.resize(whole);
    const ssize_t n = recv(socket_.fd(), &received_[had], whole - had, 0);
    received_.resize(n > 0 ? had + n : had);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return State::kGoing;
    if (n <= 0) return State::kRefused;
    if (received_.size() < whole) continue;
    const State state = Received();
    if (state != State::kGoing) return state;
    received_.clear();
  }
}

Handshake::State Handshake::Received() {
  return stage_ == Stage::kHello ? ReceivedHello() : ReceivedClaim();
}

Handshake::State Handshake::ReceivedHello() {
  const absl::StatusOr<Hello> hello = ParseHello(received_);
  if (!hello.ok()) return State::kRefused;
  if (hello->job_tag != self_.job_tag) return State::kOtherJob;
  (side_ == Side::kCaller ? name_.listener : name_.caller) = hello->nonce;
  stage_ = Stage::kClaim;
  const bool sent = side_ == Side::kListener ? SendHello() : SendClaim();
  return sent ? State::kGoing : State::kRefused;
}

Handshake::State Handshake::ReceivedClaim() {
  const absl::StatusOr<Claim> claim = ParseClaim(received_);
  if (!claim.ok()) return State::kRefused;
  const bool called = side_ == Side::kListener;
  const Side theirs = called ? Side::kCaller : Side::kListener;
  if (!IsProven(self_.key, theirs, name_, *claim)) return State::kRefused;
  // The claim is the job's, but for another rank, or from a rank that was not called.
  if (claim->peer != static_cast<uint32_t>(self_.rank)) return State::kRefused;
  if (!called && claim->rank != static_cast<uint32_t>(peer_)) return State::kRefused;
  theirs_ = *claim;
  if (called) claim_of_caller_ = theirs_;
  return called && !SendClaim() ? State::kRefused : State::kProven;
}

}  // namespace burst
