// llm.c's shards: one to three files of any content. What loads has the tokens that the files hold,
// and the documents that a plain loop finds; all else is an error that names the option.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/data/corpus.h"
#include "train/data/shards.h"

namespace burst {
namespace {

constexpr size_t kHeaderBytes = 1024;

// A shard whose header is mostly right.
std::string ShardContent(FuzzInput* input) {
  const bool wrong = input->Integer(0, 7) == 7;
  std::string tokens = input->Text(400);
  int32_t header[256] = {20240520, 1, static_cast<int32_t>(tokens.size() / 2)};
  if (wrong) {
    header[input->Integer(0, 2)] = static_cast<int32_t>(input->Integer(INT32_MIN, INT32_MAX));
  } else {
    tokens.resize(tokens.size() / 2 * 2);
    // Some tokens end a document: 50256.
    for (size_t at = input->Integer(0, 63) * 2; at + 2 <= tokens.size(); at += 46) {
      tokens[at] = '\x50', tokens[at + 1] = '\xC4';
    }
  }
  return std::string(reinterpret_cast<const char*>(header), kHeaderBytes) + tokens;
}

void CheckCorpus(const Corpus& corpus, const std::vector<int32_t>& tokens, FuzzInput* input) {
  const int64_t n = corpus.size();
  BURST_CHECK_EQ(n, static_cast<int64_t>(tokens.size()));
  const int64_t begin = input->Integer(0, n), end = input->Integer(begin, n);
  std::vector<int32_t> read(end - begin);
  BURST_CHECK(corpus.Read(begin, end - begin, read.data()).ok());
  BURST_CHECK(std::equal(read.begin(), read.end(), tokens.begin() + begin));
  std::vector<int64_t> starts, expected;
  BURST_CHECK(corpus.DocumentStarts(begin, end, &starts).ok());
  for (int64_t i = begin; i < end; ++i) {
    if (tokens[i] == kGpt2EndOfText) expected.push_back(i);
  }
  BURST_CHECK(starts == expected);
  const int64_t vocab = input->Integer(1, 70000);
  const bool fits =
      std::all_of(tokens.begin(), tokens.end(), [&](int32_t token) { return token < vocab; });
  BURST_CHECK_EQ(corpus.CheckVocab(vocab).ok(), fits) << "vocabulary " << vocab;
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  static const FuzzFolder folder;
  FuzzInput input(data, size);
  const int64_t files = input.Integer(1, 3);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < 3; ++i) {
    const std::string name = absl::StrCat("shard-", i, ".bin");
    if (i >= files) {
      unlink(folder.Path(name).c_str());
      continue;
    }
    const std::string content = input.Bool() ? input.Text(1200) : ShardContent(&input);
    folder.Write(name, content);
    for (size_t at = kHeaderBytes; at + 2 <= content.size(); at += 2) {
      uint16_t token;
      std::memcpy(&token, content.data() + at, 2);
      tokens.push_back(token);
    }
  }
  const absl::StatusOr<TrainingData> loaded =
      LoadTrainingData(folder.Path("shard-*.bin"), "", std::nullopt, folder.Path("cache"));
  if (!loaded.ok()) {
    BURST_CHECK(absl::StartsWith(loaded.status().message(), "--data: "))
        << loaded.status().ToString();
    return;
  }
  CheckCorpus(*loaded->train.corpus, tokens, &input);
  BURST_CHECK_EQ(loaded->train.size() + loaded->validation.size(),
                 static_cast<int64_t>(tokens.size()));
}

}  // namespace burst
