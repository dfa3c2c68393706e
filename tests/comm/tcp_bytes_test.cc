// Tests the formats of the bytes between processes. Reading returns the written values, and values
// beyond a limit are refused. A proof holds for one connection, one side and one claim.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "burst/comm/tcp/frame.h"
#include "burst/comm/tcp/greeting.h"
#include "burst/comm/tcp/seal.h"

namespace burst {
namespace {

TEST(Frame, IsReadAsWritten) {
  const FrameHeader header = {FrameKind::kPiece, 2, 0x0102030405060708, kMaxPieceBytes};
  const auto read = ParseFrameHeader(ToBytes(header));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->kind, header.kind);
  EXPECT_EQ(read->channel, header.channel);
  EXPECT_EQ(read->group, header.group);
  EXPECT_EQ(read->bytes, header.bytes);
}

TEST(Frame, LimitsOfEveryKind) {
  const struct {
    FrameKind kind;
    uint64_t least, most;
  } limits[] = {
      {FrameKind::kMessage, 1, 64 << 10},
      {FrameKind::kAnnounce, (64 << 10) + 1, uint64_t{1} << 40},
      {FrameKind::kGo, 0, 0},
      {FrameKind::kPiece, 1, 256 << 10},
      {FrameKind::kHeartbeat, 0, 0},
      {FrameKind::kFinished, 0, 0},
      {FrameKind::kFailed, 0, 4 << 10},
  };
  for (const auto& [kind, least, most] : limits) {
    const auto is_read = [kind = kind](uint64_t bytes) {
      return ParseFrameHeader(ToBytes(FrameHeader{kind, 0, 0, bytes})).ok();
    };
    EXPECT_TRUE(is_read(least));
    EXPECT_TRUE(is_read(most));
    EXPECT_FALSE(least > 0 && is_read(least - 1));
    for (const uint64_t bytes : {most + 1, uint64_t{1} << 63, ~uint64_t{0}}) {
      EXPECT_FALSE(is_read(bytes)) << bytes;
    }
  }
}

TEST(Frame, SaysWhatIsWrong) {
  const auto says = [](const FrameHeader& header) {
    return std::string(ParseFrameHeader(ToBytes(header)).status().message());
  };
  EXPECT_EQ(says({FrameKind::kMessage, 0, 0, uint64_t{1} << 63}),
            "a frame of kind 1 with 9223372036854775808 bytes, not 1 to 65536");
  EXPECT_EQ(says({static_cast<FrameKind>(99), 0, 0, 0}), "a frame of the unknown kind 99");
  EXPECT_EQ(says({FrameKind::kHeartbeat, 3, 0, 0}), "a frame of the channel 3");
  EXPECT_FALSE(ParseFrameHeader(std::vector<uint8_t>(23)).ok());
}

TEST(Greeting, IsReadAsWritten) {
  const Hello hello = {77, RandomNonce()};
  const auto read_hello = ParseHello(ToBytes(hello));
  ASSERT_TRUE(read_hello.ok());
  EXPECT_EQ(read_hello->job_tag, 77u);
  EXPECT_EQ(read_hello->nonce, hello.nonce);

  const Claim claim = {3, 0, 4, RandomNonce()};
  const auto read_claim = ParseClaim(ToBytes(claim));
  ASSERT_TRUE(read_claim.ok());
  EXPECT_EQ(read_claim->rank, 3u);
  EXPECT_EQ(read_claim->peer, 0u);
  EXPECT_EQ(read_claim->world_size, 4u);
  EXPECT_EQ(read_claim->proof, claim.proof);

  for (const char* address : {"", "10.0.0.1", "fe80::1:2"}) {
    const auto place = ParsePlace(ToBytes(Place{address, 65535}));
    ASSERT_TRUE(place.ok()) << address;
    EXPECT_EQ(place->address, address);
    EXPECT_EQ(place->port, 65535);
  }
}

TEST(Greeting, RefusesWhatIsNone) {
  EXPECT_FALSE(ParseHello({}).ok());
  EXPECT_FALSE(ParseHello(std::vector<uint8_t>(kHelloBytes, 'G')).ok());
  for (const Claim& claim : {Claim{4, 0, 4}, Claim{~0u, 0, 4}, Claim{0, 0, 0}}) {
    EXPECT_FALSE(ParseClaim(ToBytes(claim)).ok()) << claim.rank;
  }
  PlaceBytes place = ToBytes(Place{"10.0.0.1", 1});
  place[60] = 0;
  EXPECT_FALSE(ParsePlace(place).ok()) << "port 0";
  place[62] = 1;
  EXPECT_FALSE(ParsePlace(place).ok()) << "port 65536";
  EXPECT_FALSE(ParsePlace(ToBytes(Place{"a name", 1})).ok());
  EXPECT_FALSE(ParsePlace(std::vector<uint8_t>(kPlaceBytes, '1')).ok()) << "no end of the address";
}

TEST(Greeting, AProofHoldsForOneConnectionOneSideAndOneClaim) {
  const JobKey key = MakeJobKey("a token of the job", "job 1");
  const ConnectionName name = {RandomNonce(), RandomNonce(), 1234};
  Claim claim = {1, 0, 2};
  claim.proof = MakeProof(key, Side::kCaller, name, claim);
  EXPECT_TRUE(IsProven(key, Side::kCaller, name, claim));

  const auto caller = [&](const ConnectionName& other) {
    return IsProven(key, Side::kCaller, other, claim);
  };
  EXPECT_FALSE(IsProven(key, Side::kListener, name, claim)) << "sent back";
  EXPECT_FALSE(caller({RandomNonce(), name.listener, name.port})) << "replayed";
  EXPECT_FALSE(caller({name.caller, RandomNonce(), name.port})) << "replayed";
  EXPECT_FALSE(caller({name.caller, name.listener, 1235})) << "handed on from another port";
  EXPECT_FALSE(IsProven(MakeJobKey("another token ....", "job 1"), Side::kCaller, name, claim));
  EXPECT_FALSE(IsProven(MakeJobKey("a token of the job", "job 2"), Side::kCaller, name, claim));
  for (uint32_t Claim::*field : {&Claim::rank, &Claim::peer, &Claim::world_size}) {
    Claim other = claim;
    other.*field += 1;
    EXPECT_FALSE(IsProven(key, Side::kCaller, name, other));
  }
  Claim flipped = claim;
  flipped.proof[31] ^= 1;
  EXPECT_FALSE(IsProven(key, Side::kCaller, name, flipped));
}

TEST(Greeting, BothEndsHaveKeysThatNoOtherConnectionHas) {
  const JobKey key = MakeJobKey("a token of the job", "job 1");
  const ConnectionName name = {RandomNonce(), RandomNonce(), 1234};
  const Claim claim = {1, 0, 2};
  const SessionKeys caller = MakeSessionKeys(key, Side::kCaller, name, claim);
  const SessionKeys listener = MakeSessionKeys(key, Side::kListener, name, claim);
  EXPECT_EQ(caller.sends, listener.receives);
  EXPECT_EQ(caller.receives, listener.sends);
  const auto proof_of = [&](Side side) { return MakeProof(key, side, name, claim); };
  std::set<SessionKey> all = {caller.sends, caller.receives, proof_of(Side::kCaller),
                              proof_of(Side::kListener)};
  EXPECT_EQ(all.size(), 4u) << "no key is ever sent";
  for (const ConnectionName& other : {ConnectionName{RandomNonce(), name.listener, name.port},
                                      ConnectionName{name.caller, RandomNonce(), name.port},
                                      ConnectionName{name.caller, name.listener, 1235}}) {
    const SessionKeys keys = MakeSessionKeys(key, Side::kCaller, other, claim);
    EXPECT_TRUE(all.insert(keys.sends).second);
    EXPECT_TRUE(all.insert(keys.receives).second);
  }
}

// A record opens once, in its turn and its direction, with the content that was sealed.
TEST(Seal, OpensWhatTheOtherEndSentNext) {
  const SessionKeys keys = {RandomNonce(), RandomNonce()};
  const std::string text = "what one rank says to another";
  const auto closed = [&](Seal* seal) {
    std::string record(text.size() + Seal::kTagBytes, '\0');
    seal->Close(text.data(), text.size(), reinterpret_cast<uint8_t*>(&record[0]));
    return record;
  };
  const auto opens = [&](Seal seal, std::string record) {
    auto* const bytes = reinterpret_cast<uint8_t*>(&record[0]);
    const bool opened = seal.Open(bytes, text.size(), bytes + text.size());
    EXPECT_EQ(opened, record.substr(0, text.size()) == text);
    return opened;
  };
  Seal one(keys), other(SessionKeys{keys.receives, keys.sends});
  const std::string first = closed(&one), second = closed(&one);
  EXPECT_NE(first, second);
  EXPECT_TRUE(opens(other, first));
  EXPECT_FALSE(opens(other, second)) << "the first was left out";
  EXPECT_FALSE(opens(one, first)) << "sent back";
  EXPECT_FALSE(opens(Seal(SessionKeys{keys.receives, RandomNonce()}), second));
  for (size_t bit = 0; bit < first.size() * 8; ++bit) {
    std::string flipped = first;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    EXPECT_FALSE(opens(other, flipped)) << bit;
  }
  other.Skip();
  EXPECT_TRUE(opens(other, second));
  EXPECT_FALSE(opens(other, first)) << "repeated";
}

TEST(Seal, EmptyRecordsAreAuthenticatedToo) {
  const SessionKeys keys = {RandomNonce(), RandomNonce()};
  Seal one(keys), other(SessionKeys{keys.receives, keys.sends});
  uint8_t tag[Seal::kTagBytes];
  one.Close("", 0, tag);
  tag[0] ^= 1;
  EXPECT_FALSE(Seal(other).Open(tag, 0, tag));
  tag[0] ^= 1;
  EXPECT_TRUE(other.Open(tag, 0, tag));
}

// Test case 2 of RFC 4231.
TEST(Greeting, TheKeyIsHmacSha256) {
  const JobKey key = MakeJobKey("Jefe", "what do ya want for nothing?");
  const uint8_t expected[] = {0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e};
  EXPECT_TRUE(std::equal(expected, expected + 8, key.begin()));
}

}  // namespace
}  // namespace burst
