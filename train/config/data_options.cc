// The options that read data.
#include "train/config/option_group.h"

namespace burst {
namespace {

void AddRows(TrainConfig* c, OptionTable* t) {
  t->Group("data");
  t->Add("data", &c->data)
      .Basic()
      .MayChange()
      .Of(Scope::kHost)
      .Help(
          "Train on a text, a folder, .jsonl lines, .bin shards, or a mixture, a:0.7,b:0.3. kjv: "
          "the "
          "King James Bible, built in.");
  t->Add("val_data", &c->val_data)
      .Basic()
      .MayChange()
      .Of(Scope::kHost)
      .Help("Validate on this, of the same kind. Empty: the last tenth of --data.");
  t->Add("field", &c->lines.field).MayChange().Help(kFieldHelp);
  t->Add("bad_lines", &c->lines.bad_lines, kBadLines).MayChange().Help(kBadLinesHelp);
  t->Add("tokenizer", &c->tokenizer)
      .Basic()
      .Of(Scope::kHost)
      .Help(
          "Make tokens by char, byte, tokenizer.model, tokenizer.json, or a folder of one. auto: "
          "the own tokenizer of --model, else char.");
  t->Add("packed", &c->packed)
      .Help(
          "End attention at documents: files of a folder, .jsonl lines, blocks between blank "
          "lines, end-of-text tokens of shards.");
  t->Add("data_cache", &c->data_cache)
      .MayChange()
      .Of(Scope::kHost)
      .Help(
          "Keep tokens of texts and scans of shards in this folder, the eight files used last. "
          "Empty: .data-cache next to the folder of the run.");
}

}  // namespace

const OptionGroup kDataOptions = {AddRows};

}  // namespace burst
