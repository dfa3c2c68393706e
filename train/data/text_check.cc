#include "train/data/text_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "burst/base/status.h"
#include "burst/cli/text.h"
#include "train/data/unpacked_file.h"
#include "train/data/utf8.h"

namespace burst {
namespace {

constexpr char kAsLines[] =
    "write its texts as lines of JSON, {\"text\": \"...\"}, into a file named .jsonl";
constexpr char kParquet[] =
    "convert it with pyarrow: python3 -c 'import json, sys, pyarrow.parquet as p; "
    "[print(json.dumps(r, default=str)) for f in sys.argv[1:] for b in p.ParquetFile(f)"
    ".iter_batches() for r in b.to_pylist()]' *.parquet | zstd > data.jsonl.zst";
constexpr char kNotData[] = "give the text files alone, or remove it from the folder";
constexpr char kWeights[] = "--model brings a model in; --data takes texts";

using namespace std::string_view_literals;  // NOLINT: signatures hold NULs

struct Signature {
  size_t at;  // byte
  std::string_view bytes;
  const char* name;
  const char* advice;
};

// These bytes come from the formats' own specifications. Signatures that texts could begin with are
// longer than the magic number.
constexpr Signature kSignatures[] = {
    {0, "\x1f\x8b\x08"sv, "gzip", "unpack it first, with gunzip, or name it .jsonl.gz"},
    {0, "\x28\xb5\x2f\xfd"sv, "zstd", "unpack it first, with zstd -d, or name it .jsonl.zst"},
    {0,
     "\xfd"sv
     "7zXZ\0"sv,
     "xz", "unpack it first, with unxz"},
    {0, "\x04\x22\x4d\x18"sv, "lz4", "unpack it first, with lz4 -d"},
    {0, "7z\xbc\xaf\x27\x1c"sv, "7-Zip", "unpack it first, with 7z x"},
    {0, "PK\x03\x04"sv, "a ZIP archive (or a model of PyTorch)", "unpack it first, with unzip"},
    {0, "PK\x05\x06"sv, "an empty ZIP archive", kNotData},
    {257, "ustar"sv, "a tar archive", "unpack it first, with tar -x"},
    {0, "PAR1\x15"sv, "Parquet", kParquet},
    {0, "ARROW1\0\0"sv, "Arrow", kAsLines},
    {0, "\xff\xff\xff\xff"sv, "an Arrow stream", kAsLines},
    {0, "Obj\x01"sv, "Avro", kAsLines},
    {0, "\x89HDF\r\n\x1a\n"sv, "HDF5", kAsLines},
    {0, "SQLite format 3\0"sv, "SQLite", kAsLines},
    {0, "\x93NUMPY"sv, "an array of NumPy",
     "tokens belong into .bin shards (train/data/shards.h), texts into text files"},
    {0, "\x80\x02"sv, "a pickle of Python", kAsLines},
    {0, "\x80\x03"sv, "a pickle of Python", kAsLines},
    {0, "\x80\x04\x95"sv, "a pickle of Python", kAsLines},
    {0, "\x80\x05\x95"sv, "a pickle of Python", kAsLines},
    {0, "\x89PNG\r\n\x1a\n"sv, "a PNG picture", kNotData},
    {0, "\xff\xd8\xff"sv, "a JPEG picture", kNotData},
    {0, "GIF87a"sv, "a GIF picture", kNotData},
    {0, "GIF89a"sv, "a GIF picture", kNotData},
    {0, "%PDF-"sv, "PDF", "extract its text first, for example with pdftotext"},
    {0,
     "\x7f"sv
     "ELF"sv,
     "a program (ELF)", kNotData},
    {0, "\x88\xd8\x34\x01"sv, "a shard of llm.c", "name it .bin"},
    {0, "\xa1\xd9\x34\x01"sv, "a shard of llm.c", "name it .bin"},
    {0, "\xff\xfe\0\0"sv, "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"},
    {0, "\0\0\xfe\xff"sv, "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"},
    {0, "\xff\xfe"sv, "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"},
    {0, "\xfe\xff"sv, "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"},
};

bool HasAt(absl::string_view text, size_t at, std::string_view bytes) {
  return text.size() >= at + bytes.size() &&
         std::memcmp(text.data() + at, bytes.data(), bytes.size()) == 0;
}

// Recognizes bzip2: "BZh", the size of a block, and the first block's number.
bool IsBzip2(absl::string_view text) {
  return text.size() >= 10 && HasAt(text, 0, "BZh"sv) && text[3] >= '1' && text[3] <= '9' &&
         HasAt(text, 4, "1AY&SY"sv);
}

// Recognizes safetensors: the length of a JSON object, and the object.
bool IsSafetensors(absl::string_view text) {
  if (text.size() < 9 || text[8] != '{') return false;
  uint64_t length = 0;
  std::memcpy(&length, text.data(), sizeof(length));
  return 2 <= length && length <= 100'000'000;
}

bool IsGguf(absl::string_view text) {
  return HasAt(text, 0, "GGUF"sv) && HasAt(text, 5, "\0\0\0"sv);
}

absl::Status NotText(absl::string_view path, absl::string_view what, absl::string_view advice) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, " must be text in UTF-8; got ", what, "; ", advice));
}

// Statistics of samples of a file.
struct Sample {
  std::string beginning;
  int64_t bytes = 0, not_utf8 = 0;
  int64_t nuls = 0, nuls_at_odd = 0, first_nul = -1;

  // Adds a block that begins at `offset`. `cut_end` says that the file goes on after it.
  void Add(int64_t offset, absl::string_view text, bool cut_end) {
    size_t at = 0;
    if (offset > 0) {  // skips the end of a character
      while (at < std::min<size_t>(3, text.size()) && ContinuesCharacter(text[at])) ++at;
    }
    bytes += static_cast<int64_t>(text.size());
    while (at < text.size()) {
      const size_t start = at;
      const uint32_t character = NextCodePoint(text, &at);
      if (character == kCodePoints) {
        at = start + 1;
        if (!cut_end || start + 4 <= text.size()) ++not_utf8;
      } else if (character == 0) {
        ++nuls;
        nuls_at_odd += (offset + static_cast<int64_t>(start)) % 2;
        if (first_nul < 0) first_nul = offset + static_cast<int64_t>(start);
      }
    }
  }
};

absl::StatusOr<std::string> UnpackedBeginning(InputFile input, int64_t bytes) {
  BURST_ASSIGN_OR_RETURN(const auto file, UnpackedFile::Open(std::move(input)));
  std::string text;
  BURST_RETURN_IF_ERROR(file->Read(bytes, &text));
  return text;
}

absl::StatusOr<Sample> SampleOf(const Sources& sources, const SourceFile& file) {
  constexpr int64_t kBlock = int64_t{1} << 16;
  BURST_ASSIGN_OR_RETURN(InputFile input, sources.Open(file));
  const int64_t size = input.size();
  Sample sample;
  if (sources.json_lines) {  // these may be packed, which can be read from the beginning only
    const absl::StatusOr<std::string> text = UnpackedBeginning(std::move(input), kBlock);
    if (!text.ok()) return sources.Error(text.status());
    sample.Add(0, *text, /*cut_end=*/static_cast<int64_t>(text->size()) == kBlock);
    sample.beginning = *text;
    return sample;
  }
  std::vector<int64_t> offsets = {0};
  if (size > kBlock) offsets.push_back(std::max(kBlock, size / 2));
  if (size > 2 * kBlock) offsets.push_back(std::max(offsets.back() + kBlock, size - kBlock));
  for (const int64_t offset : offsets) {
    std::string text(std::max<int64_t>(0, std::min(kBlock, size - offset)), '\0');
    BURST_RETURN_IF_ERROR(
        sources.Error(input.ReadAt(offset, static_cast<int64_t>(text.size()), text.data())));
    sample.Add(offset, text, offset + static_cast<int64_t>(text.size()) < size);
    if (offset == 0) sample.beginning = std::move(text);
  }
  return sample;
}

absl::Status CheckBytes(const std::string& path, const Sample& sample) {
  constexpr char kAnyBytes[] = "--tokenizer=byte of //train takes any bytes";
  if (sample.nuls > 0) {
    // In UTF-16, every second byte of English is a NUL.
    const int64_t even = sample.nuls - sample.nuls_at_odd;
    const bool alternates =
        5 * sample.nuls > sample.bytes && (even == 0 || sample.nuls_at_odd == 0);
    if (alternates) {
      const char* const order = even == 0 ? "LE" : "BE";
      return NotText(path, "UTF-16 without a byte order mark",
                     absl::StrCat("convert it: iconv -f UTF-16", order, " -t UTF-8"));
    }
    return NotText(path, absl::StrCat("a NUL at byte ", sample.first_nul),
                   absl::StrCat(kNotData, "; ", kAnyBytes));
  }
  constexpr int64_t kFew = 16, kOneIn = 1000;
  if (sample.not_utf8 < kFew || sample.not_utf8 * kOneIn <= sample.bytes) return absl::OkStatus();
  return NotText(
      path,
      absl::StrCat(Thousands(sample.not_utf8), " bytes that are not, among ",
                   Thousands(sample.bytes), " that were looked at"),
      absl::StrCat("convert it, for example: iconv -f ISO-8859-1 -t UTF-8; ", kAnyBytes));
}

enum class JsonForm { kNone, kList, kRecords };

// Recognizes a text that begins with a list of objects, or with an object that has the key `field`
// before anything is nested in it.
JsonForm JsonOf(absl::string_view text, const std::string& field) {
  text = absl::StripLeadingAsciiWhitespace(text);
  const bool list = absl::ConsumePrefix(&text, "[");
  text = absl::StripLeadingAsciiWhitespace(text);
  if (!absl::ConsumePrefix(&text, "{")) return JsonForm::kNone;
  if (!absl::StartsWith(absl::StripLeadingAsciiWhitespace(text), "\"")) return JsonForm::kNone;
  if (list) return JsonForm::kList;
  const absl::string_view line = text.substr(0, text.find('\n'));
  const std::string key = absl::StrCat("\"", field, "\"");
  const size_t at = line.find(key);
  if (at == absl::string_view::npos) return JsonForm::kNone;
  const absl::string_view behind = absl::StripLeadingAsciiWhitespace(line.substr(at + key.size()));
  return absl::StartsWith(behind, ":") ? JsonForm::kRecords : JsonForm::kNone;
}

}  // namespace

KnownFormat FormatOf(absl::string_view beginning) {
  for (const Signature& signature : kSignatures) {
    if (HasAt(beginning, signature.at, signature.bytes)) return {signature.name, signature.advice};
  }
  if (IsBzip2(beginning)) return {"bzip2", "unpack it first, with bunzip2"};
  if (IsSafetensors(beginning)) return {"safetensors", kWeights};
  if (IsGguf(beginning)) return {"GGUF", kWeights};
  return {};
}

absl::Status CheckIsText(const Sources& sources, bool any_bytes, const std::string& field) {
  const SourceFile* json_file = nullptr;
  JsonForm json = JsonForm::kNone;
  bool all_json = !sources.json_lines;
  for (const SourceFile& file : sources.files) {
    if (file.identity.bytes == 0) continue;
    BURST_ASSIGN_OR_RETURN(const Sample sample, SampleOf(sources, file));
    const KnownFormat format = FormatOf(sample.beginning);
    if (!format.name.empty()) {
      return sources.Error(NotText(file.path, format.name, format.advice));
    }
    if (!any_bytes) BURST_RETURN_IF_ERROR(sources.Error(CheckBytes(file.path, sample)));
    const JsonForm kind = all_json ? JsonOf(sample.beginning, field) : JsonForm::kNone;
    all_json &= kind != JsonForm::kNone;
    if (json_file == nullptr) json_file = &file, json = kind;
  }
  // Between files of other kinds, JSON is a text like a program's source.
  if (json_file == nullptr || !all_json) return absl::OkStatus();
  return sources.Error(
      json == JsonForm::kList
          ? NotText(json_file->path, "a list of JSON objects",
                    "write one object a line, without the list's brackets and commas, into a file "
                    "named .jsonl (jq -c '.[]')")
          : NotText(json_file->path, absl::StrCat("JSON objects with the key '", field, "'"),
                    "a file named .jsonl is read as one document a line"));
}

}  // namespace burst
