#include "model/execution/parameter_use.h"

namespace burst {

void UnitUses::BeginPass(Tape& tape) const {
  if (use_ != nullptr) use_->BeginPass(tape);
}

void UnitUses::BeginEmbedding(Tape& tape) const {
  if (use_ == nullptr) return;
  use_->BeginValues(tape, 0, 1);
  tape.OnBackward([this, &tape] { use_->EndGrads(tape, 0); });
}

void UnitUses::EndEmbedding(Tape& tape) const {
  if (use_ == nullptr) return;
  use_->EndValues(0);
  // A tied head on this stage has begun the gradients already.
  if (!tied_ || !part_.HasLast()) {
    tape.OnBackward([this] { use_->BeginGrads(0); });
  }
}

void UnitUses::BeginLayer(Tape& tape, int64_t layer, bool prefetches) const {
  if (use_ == nullptr) return;
  const int unit = 1 + static_cast<int>(layer);
  const bool has_next = layer + 1 == layers_ || layer + 1 < part_.RunOf(layers_, layer).end;
  use_->BeginValues(tape, unit, prefetches && has_next ? unit + 1 : -1);
  tape.OnBackward([this, &tape, unit] {
    use_->EndGrads(tape, unit);
    use_->EndValues(unit);
  });
}

void UnitUses::EndLayer(Tape& tape, int64_t layer, int64_t before, bool backward_follows) const {
  if (use_ == nullptr) return;
  const int unit = 1 + static_cast<int>(layer);
  if (!backward_follows) use_->EndValues(unit);
  const bool begins_run = layer == part_.RunOf(layers_, layer).begin;
  const int next = begins_run ? -1 : 1 + static_cast<int>(before);
  tape.OnBackward([this, &tape, unit, next] {
    use_->BeginValues(tape, unit, next);
    use_->BeginGrads(unit);
  });
}

void UnitUses::BeginHead(Tape& tape) const {
  if (use_ == nullptr) return;
  const int unit = head_unit();
  use_->BeginValues(tape, unit, tied_ ? 0 : -1);
  tape.OnBackward([this, &tape, unit] {
    use_->EndGrads(tape, unit);
    use_->EndValues(unit);
    if (tied_ && !part_.HasFirst()) use_->EndGrads(tape, 0);
  });
  if (tied_) use_->BeginValues(tape, 0, -1);
}

void UnitUses::EndHead(Tape& tape) const {
  if (use_ == nullptr) return;
  const int unit = head_unit();
  if (tied_) use_->EndValues(0);  // the loss has used the values for its gradient, too
  const bool backward_follows = part_.chunks == 1;
  if (!tape.recording() || !backward_follows) use_->EndValues(unit);
  tape.OnBackward([this, &tape, unit, backward_follows] {
    if (!backward_follows) use_->BeginValues(tape, unit, unit - 1);
    use_->BeginGrads(unit);
    if (tied_) use_->BeginGrads(0);
  });
}

}  // namespace burst
