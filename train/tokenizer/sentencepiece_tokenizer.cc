#include "train/tokenizer/sentencepiece_tokenizer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "train/data/utf8.h"
#include "train/tokenizer/places.h"

namespace burst {
namespace {

constexpr absl::string_view kSpaceSymbol = "\xE2\x96\x81";    // U+2581
constexpr absl::string_view kNotACharacter = "\xEF\xBF\xBD";  // U+FFFD
constexpr absl::string_view kWithoutSpace("\x1a\x02\x18\x00", 4);
// Bytes of a short word; words that are remembered.
constexpr size_t kShortWord = 48, kMostKnownWords = 1 << 17;
constexpr int kByteTokens = 256;

// Returns the bytes of the space at a place of the text, or 0 if something else is there.
size_t SpaceAt(absl::string_view text, size_t at) {
  if (at >= text.size()) return 0;
  if (text[at] == ' ') return 1;
  if (text[at] != kSpaceSymbol[0]) return 0;
  return absl::StartsWith(text.substr(at), kSpaceSymbol) ? kSpaceSymbol.size() : 0;
}

// ---- What the file says of itself (sentencepiece_model.proto), which the library does not tell.

struct ModelFields {
  bool is_bpe = false;  // otherwise unigram, words or characters
  bool byte_fallback = false, space_behind = false;
  bool changes_characters = false, adds_space = true, removes_spaces = true, escapes_spaces = true;
  std::vector<bool> is_defined;  // by token: a symbol that the model's maker defined
};

// Reads the fields of a protocol buffer's message: numbers, and bytes of strings and messages.
class ProtoReader {
 public:
  explicit ProtoReader(absl::string_view bytes) : bytes_(bytes) {}

  struct Field {
    int number = 0;
    uint64_t value = 0;       // value of a varint
    absl::string_view bytes;  // bytes of a string or message
  };
  // Returns the next field, or nullopt at the end and where the bytes are not a message.
  std::optional<Field> Next() {
    uint64_t key = 0;
    if (bytes_.empty() || !Varint(&key)) return std::nullopt;
    Field field;
    field.number = static_cast<int>(key >> 3 & 0x1fffffff);
    uint64_t length = 0;
    switch (key & 7) {
      case 0:
        if (!Varint(&field.value)) return std::nullopt;
        return field;
      case 1:
        length = 8;
        break;
      case 2:
        if (!Varint(&length)) return std::nullopt;
        break;
      case 5:
        length = 4;
        break;
      default:
        bytes_ = "?";  // a group, which no such file has
        return std::nullopt;
    }
    if (length > bytes_.size()) return std::nullopt;
    field.bytes = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return field;
  }
  bool whole() const { return bytes_.empty(); }

 private:
  bool Varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && !bytes_.empty(); shift += 7) {
      const auto byte = static_cast<uint8_t>(bytes_[0]);
      bytes_.remove_prefix(1);
      *value |= uint64_t{byte & 127u} << shift;
      if (byte < 128) return true;
    }
    bytes_ = "?";
    return false;
  }

  absl::string_view bytes_;
};

std::optional<ModelFields> ReadModelFields(absl::string_view model) {
  ModelFields fields;
  ProtoReader reader(model);
  while (const auto part = reader.Next()) {
    ProtoReader inner(part->bytes);
    if (part->number == 1) {  // a piece
      constexpr uint64_t kUserDefined = 4;
      bool is_defined = false;
      while (const auto field = inner.Next()) {
        if (field->number == 3) is_defined = field->value == kUserDefined;
      }
      if (!inner.whole()) return std::nullopt;
      fields.is_defined.push_back(is_defined);
    } else if (part->number == 2) {  // trainer_spec
      while (const auto field = inner.Next()) {
        if (field->number == 3) fields.is_bpe = field->value == 2;
        if (field->number == 24) fields.space_behind = field->value != 0;
        if (field->number == 35) fields.byte_fallback = field->value != 0;
      }
      if (!inner.whole()) return std::nullopt;
    } else if (part->number == 3 || part->number == 5) {  // normalizer_spec, denormalizer_spec
      while (const auto field = inner.Next()) {
        if (field->number == 2) fields.changes_characters |= !field->bytes.empty();
        if (part->number == 5) continue;
        if (field->number == 3) fields.adds_space = field->value != 0;
        if (field->number == 4) fields.removes_spaces = field->value != 0;
        if (field->number == 5) fields.escapes_spaces = field->value != 0;
      }
      if (!inner.whole()) return std::nullopt;
    }
  }
  if (!reader.whole()) return std::nullopt;
  return fields;
}

absl::Status CheckSupported(const ModelFields& fields) {
  const auto refuse = [](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is not supported"));
  };
  if (fields.changes_characters) return refuse("normalizer_spec.precompiled_charsmap");
  if (fields.removes_spaces) return refuse("normalizer_spec.remove_extra_whitespaces");
  if (!fields.escapes_spaces) return refuse("normalizer_spec.escape_whitespaces = false");
  if (fields.space_behind) return refuse("trainer_spec.treat_whitespace_as_suffix");
  if (!fields.byte_fallback) return refuse("trainer_spec.byte_fallback = false");
  return absl::OkStatus();
}

// Returns whether a space follows something else within the piece of the vocabulary.
bool ReachesToASpace(absl::string_view piece) {
  bool other = false;
  for (size_t at = 0; at < piece.size();) {
    const size_t space = SpaceAt(piece, at);
    if (space > 0 && other) return true;
    other = space == 0;
    at += std::max<size_t>(1, space);
  }
  return false;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const SentencePieceTokenizer>> SentencePieceTokenizer::FromModel(
    absl::string_view model) {
  std::optional<ModelFields> fields = ReadModelFields(model);
  if (!fields.has_value() || model.empty()) {
    return absl::InvalidArgumentError("not a model of SentencePiece");
  }
  BURST_RETURN_IF_ERROR(CheckSupported(*fields));
  std::shared_ptr<SentencePieceTokenizer> tokenizer(new SentencePieceTokenizer());
  SentencePieceLibrary& library = tokenizer->library_;
  // AppendWithPlaces adds the space before a text, because the text after a control token has none.
  // normalizer_spec.add_dummy_prefix now occurs twice, and the later one counts.
  const std::string error = library.Load(absl::StrCat(model, kWithoutSpace));
  if (!error.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("not a model of SentencePiece: ", error));
  }
  tokenizer->adds_space_ = fields->adds_space;
  tokenizer->pieces_are_words_ = fields->is_bpe;
  tokenizer->is_defined_ = std::move(fields->is_defined);
  int byte_tokens = 0;
  for (int id = 0; id < library.size(); ++id) {
    const std::string& piece = library.piece(id);
    std::string bytes;
    const SentencePieceLibrary::Kind kind = library.kind(id);
    const bool unknown = kind == SentencePieceLibrary::Kind::kUnknown;
    if (unknown || kind == SentencePieceLibrary::Kind::kControl) {
      if (!piece.empty()) tokenizer->controls_.emplace_back(piece, id);
    } else if (kind == SentencePieceLibrary::Kind::kByte) {  // "<0x0A>"
      uint32_t byte = 0;
      if (piece.size() == 6 && absl::SimpleHexAtoi(piece.substr(3, 2), &byte)) ++byte_tokens;
      bytes.push_back(static_cast<char>(byte));
    } else if (kind == SentencePieceLibrary::Kind::kText) {
      if (ReachesToASpace(piece)) tokenizer->pieces_are_words_ = false;
      for (size_t at = 0; at < piece.size();) {
        const size_t space = SpaceAt(piece, at);
        bytes.push_back(space > 0 ? ' ' : piece[at]);
        at += std::max<size_t>(1, space);
      }
    }
    tokenizer->bytes_.push_back(std::move(bytes));
  }
  if (byte_tokens != kByteTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has tokens for ", byte_tokens, " of the 256 bytes"));
  }
  tokenizer->end_of_text_ = library.end_of_text();
  return std::shared_ptr<const SentencePieceTokenizer>(std::move(tokenizer));
}

bool SentencePieceTokenizer::IsAdded(absl::string_view text, int64_t token) const {
  if (token < 0 || token >= vocab() || library_.piece(static_cast<int>(token)) != text) {
    return false;
  }
  const SentencePieceLibrary::Kind kind = library_.kind(static_cast<int>(token));
  return kind == SentencePieceLibrary::Kind::kControl ||
         kind == SentencePieceLibrary::Kind::kUnknown ||
         (is_defined_[token] && !adds_space_ && !absl::StrContains(text, ' '));
}

size_t SentencePieceTokenizer::PieceLength(int32_t token, absl::string_view text) const {
  size_t length = 0;
  for (const char byte : Bytes(token)) {
    length += byte == ' ' ? std::max<size_t>(1, SpaceAt(text, length)) : 1;
  }
  return std::min(length, text.size());
}

std::unique_ptr<FileEncoder> SentencePieceTokenizer::MakeEncoder(Specials specials) const {
  return std::make_unique<SentencePieceEncoder>(shared_from_this(), specials);
}

// Returns the first control token whose text begins at or after `begin`. If several begin there, it
// is the longest one. `found` has each token's next place (empty: unknown), and keeps it for later.
SentencePieceEncoder::Control SentencePieceEncoder::FindControl(absl::string_view text,
                                                                size_t begin,
                                                                std::vector<size_t>* found) const {
  Control first{text.size(), 0, -1};
  if (specials_ == Specials::kAreText) return first;
  const auto& controls = tokenizer_->controls_;
  const bool is_known = !found->empty();
  found->resize(controls.size());
  for (size_t i = 0; i < controls.size(); ++i) {
    const auto& [name, id] = controls[i];
    size_t& at = (*found)[i];
    if (!is_known || at < begin) at = text.find(name, begin);
    if (at == absl::string_view::npos) continue;
    if (at < first.begin || (at == first.begin && name.size() > first.length)) {
      first = {at, name.size(), id};
    }
  }
  return first;
}

// SentencePiece adds its space to the text, in some prompts also to the text after a control token.
void SentencePieceEncoder::AppendWithPlaces(absl::string_view text, bool begins,
                                            absl::Span<size_t> places, FormedText* out) const {
  std::string& formed = out->text;
  std::vector<size_t> found;
  for (size_t at = 0; at < text.size();) {
    const Control control = FindControl(text, at, &found);
    const bool spaced = at > 0 ? specials_ == Specials::kAreTokensAndSpaced : begins;
    // As in transformers, a prompt that begins with a space gets no second one.
    const bool has_space = specials_ != Specials::kAreText && SpaceAt(text, at) > 0;
    if (control.begin > at && spaced && !has_space && tokenizer_->adds_space_) {
      MovePlaces(formed.size(), TakePlaces(at, at + 1, &places));
      formed.push_back(' ');
    }
    const absl::string_view part = text.substr(0, control.begin);
    while (at < part.size()) {
      size_t valid = at, next = at;  // the ends of valid UTF-8
      while (next < part.size() && NextCodePoint(part, &next) != kCodePoints) valid = next;
      MovePlaces(formed.size(), TakePlaces(at, valid, &places));
      absl::StrAppend(&formed, part.substr(at, valid - at));
      at = valid;
      if (at == part.size()) break;
      MovePlaces(formed.size(), TakePlaces(at, at + 1, &places));
      absl::StrAppend(&formed, kNotACharacter);
      ++at;
    }
    at = control.begin + control.length;
    if (control.token < 0) break;
    out->AppendAdded(text.substr(control.begin, control.length), control.token,
                     TakePlaces(control.begin, at, &places));
  }
  for (size_t& place : places) place = formed.size();
}

// Returns the end of the spaces at `begin` and of the other characters after them.
size_t SentencePieceEncoder::EndOfWord(absl::string_view text, size_t begin) const {
  if (!tokenizer_->pieces_are_words_) return text.size();
  size_t at = begin;
  while (const size_t space = SpaceAt(text, at)) at += space;
  while (at < text.size() && SpaceAt(text, at) == 0) ++at;
  return at;
}

absl::StatusOr<size_t> SentencePieceEncoder::EncodePieces(const FormedText& text, size_t begin,
                                                          size_t limit, bool complete,
                                                          std::vector<int32_t>* tokens) {
  size_t at = begin;
  auto added = text.NextAdded(at);
  while (at < limit) {
    const bool is_last = added == text.added.end();
    if (!is_last && added->begin == at) {
      tokens->push_back(added->token);
      at = added++->end;
      continue;
    }
    const auto part =
        absl::string_view(text.text).substr(0, is_last ? text.text.size() : added->begin);
    const size_t end = EndOfWord(part, at);
    if (end == part.size() && is_last && !complete) return kMore;
    BURST_RETURN_IF_ERROR(AppendWord(part.substr(at, end - at), tokens));
    at = end;
  }
  return at;
}

absl::Status SentencePieceEncoder::AppendWord(absl::string_view word,
                                              std::vector<int32_t>* tokens) {
  if (word.size() > kShortWord) return Ask(word, tokens);
  const auto found = known_.find(word);
  if (found != known_.end()) {
    const auto begin = known_tokens_.begin() + found->second.begin;
    tokens->insert(tokens->end(), begin, begin + found->second.count);
    return absl::OkStatus();
  }
  const size_t before = tokens->size();
  BURST_RETURN_IF_ERROR(Ask(word, tokens));
  if (known_.size() == kMostKnownWords) {
    known_.clear();
    known_tokens_.clear();
  }
  known_[word] = {static_cast<uint32_t>(known_tokens_.size()),
                  static_cast<uint32_t>(tokens->size() - before)};
  known_tokens_.insert(known_tokens_.end(), tokens->begin() + before, tokens->end());
  return absl::OkStatus();
}

absl::Status SentencePieceEncoder::Ask(absl::string_view word, std::vector<int32_t>* tokens) const {
  const std::string error = tokenizer_->library_.Encode(word.data(), word.size(), tokens);
  if (error.empty()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("SentencePiece: ", error));
}

}  // namespace burst
