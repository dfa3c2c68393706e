// Reads llm.c's shards, one to three files of any content. Shards that load have the tokens of the
// files, and the documents that a plain loop finds. Other files are refused with an error that
// names the option.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "tests/fuzz/fuzz_file.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/data/corpus.h"
#include "train/data/shards.h"

namespace burst {
namespace {

constexpr size_t kHeaderBytes = 1024;

// Returns a shard of 16 or 32 bits, whose header is usually right.
std::string ShardContent(FuzzInput* input) {
  const bool wrong = input->Integer(0, 7) == 7, wide = input->Integer(0, 3) == 3;
  std::string tokens = input->Text(400);
  const size_t width = wide ? 4 : 2;
  int32_t header[256] = {wide ? 20240801 : 20240520, wide ? 7 : 1,
                         static_cast<int32_t>(tokens.size() / width)};
  if (wrong) {
    header[input->Integer(0, 4)] = static_cast<int32_t>(input->Integer(INT32_MIN, INT32_MAX));
  } else {
    tokens.resize(tokens.size() / width * width);
    // The vocabulary and the end-of-text token are random, or llm.c's: 50256, and 128000 in 32
    // bits.
    if (input->Bool()) {
      header[3] = static_cast<int32_t>(input->Integer(1, 200000));
      header[4] = static_cast<int32_t>(input->Integer(-1, header[3] - 1));
    }
    const int32_t end_of_text = header[3] != 0 ? header[4] : wide ? 128000 : 50256;
    for (size_t at = input->Integer(0, 63) * 4; at + width <= tokens.size(); at += 48) {
      std::memcpy(&tokens[at], &end_of_text, width);  // some tokens end a document
    }
  }
  return std::string(reinterpret_cast<const char*>(header), kHeaderBytes) + tokens;
}

// Reads the tokens of a shard that opens. Numbers beyond int32 count as the largest one.
void ReadTokens(const std::string& content, std::vector<int32_t>* tokens) {
  int32_t magic = 0;
  std::memcpy(&magic, content.data(), std::min(content.size(), sizeof(magic)));
  const size_t width = magic == 20240801 ? 4 : 2;
  for (size_t at = kHeaderBytes; at + width <= content.size(); at += width) {
    uint32_t token = 0;
    std::memcpy(&token, content.data() + at, width);
    tokens->push_back(static_cast<int32_t>(std::min<uint32_t>(token, INT32_MAX)));
  }
}

void CheckCorpus(const Corpus& corpus, const std::vector<int32_t>& tokens, int32_t end_of_text,
                 FuzzInput* input) {
  const int64_t n = corpus.size();
  BURST_CHECK_EQ(n, static_cast<int64_t>(tokens.size()));
  const int64_t begin = input->Integer(0, n), end = input->Integer(begin, n);
  std::vector<int32_t> read(end - begin);
  BURST_CHECK(corpus.Read(begin, end - begin, read.data()).ok());
  BURST_CHECK(std::equal(read.begin(), read.end(), tokens.begin() + begin));
  std::vector<int64_t> starts, expected;
  BURST_CHECK(corpus.DocumentStarts(begin, end, &starts).ok());
  for (int64_t i = begin; i < end; ++i) {
    if (tokens[i] == end_of_text) expected.push_back(i);
  }
  BURST_CHECK(starts == expected);
  const int64_t vocab = input->Integer(1, 200000);
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
  std::string first;
  for (int64_t i = 0; i < 3; ++i) {
    const std::string name = absl::StrCat("shard-", i, ".bin");
    if (i >= files) {
      unlink(folder.Path(name).c_str());
      continue;
    }
    const std::string content = input.Bool() ? input.Text(1200) : ShardContent(&input);
    folder.Write(name, content);
    ReadTokens(content, &tokens);
    if (i == 0) first = content;
  }
  const ScopedThreadPool one_thread(1);
  const absl::StatusOr<TrainingData> loaded =
      LoadTrainingData(folder.Path("shard-*.bin"), "", std::nullopt, folder.Path("cache"));
  if (!loaded.ok()) {
    BURST_CHECK(absl::StartsWith(loaded.status().message(), "--data: "))
        << loaded.status().ToString();
    return;
  }
  int32_t header[5];  // header of the first shard; all have the same vocabulary
  std::memcpy(header, first.data(), sizeof(header));
  const int32_t llm_c = header[0] == 20240801 ? 128000 : 50256;
  CheckCorpus(*loaded->train.corpus, tokens, header[3] != 0 ? header[4] : llm_c, &input);
  BURST_CHECK_EQ(loaded->train.size() + loaded->validation.size(),
                 static_cast<int64_t>(tokens.size()));
}

}  // namespace burst
