#include "train/tokenizer/sentencepiece_library.h"

#include <sentencepiece_processor.h>

namespace burst {
namespace {

// Status is SentencePiece's own class, or Abseil's in later versions.
template <typename Status>
std::string Message(const Status& status) {
  if (status.ok()) return "";
  const std::string message = status.ToString();
  return message.empty() ? "unknown error" : message;
}

}  // namespace

SentencePieceLibrary::SentencePieceLibrary()
    : processor_(std::make_unique<sentencepiece::SentencePieceProcessor>()) {}
SentencePieceLibrary::~SentencePieceLibrary() = default;

std::string SentencePieceLibrary::Load(const std::string& model) {
  return Message(processor_->LoadFromSerializedProto(model));
}

int SentencePieceLibrary::size() const { return processor_->GetPieceSize(); }

SentencePieceLibrary::Kind SentencePieceLibrary::kind(int id) const {
  if (processor_->IsControl(id)) return Kind::kControl;
  if (processor_->IsByte(id)) return Kind::kByte;
  return processor_->IsUnknown(id) ? Kind::kUnknown : Kind::kText;
}

const std::string& SentencePieceLibrary::piece(int id) const { return processor_->IdToPiece(id); }

int SentencePieceLibrary::Find(const std::string& piece) const {
  const int id = processor_->PieceToId(piece);
  return processor_->IsUnknown(id) ? -1 : id;
}

int SentencePieceLibrary::end_of_text() const { return processor_->eos_id(); }

int SentencePieceLibrary::begin_of_text() const { return processor_->bos_id(); }

std::string SentencePieceLibrary::Encode(const char* text, size_t bytes,
                                         std::vector<int32_t>* tokens) const {
  std::vector<int> ids;
  const std::string error = Message(processor_->Encode({text, bytes}, &ids));
  if (error.empty()) tokens->insert(tokens->end(), ids.begin(), ids.end());
  return error;
}

}  // namespace burst
