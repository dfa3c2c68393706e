#include "train/optimizer/muon_matrices.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "burst/base/check.h"

namespace burst {
namespace {

// Returns the rows of the matrices that are one behind the other in a parameter.
std::vector<int64_t> RowsOf(const Parameter& parameter, const ModelConfig& model) {
  if (absl::EndsWith(parameter.name, "attention.qkv.weight")) {
    const int64_t kv = model.kv_heads * model.head_dim;
    return {model.attention_channels(), kv, kv};
  }
  if (absl::EndsWith(parameter.name, "ffn.gate_up.weight")) return {model.ffn, model.ffn};
  return {parameter.full_shape[0]};
}

// A range of a matrix, in its order of elements, that a tensor parallel rank has. It begins at
// element `at` of the rank's shard of the parameter.
struct Part {
  int64_t begin, length, at;
  bool copy;
};

// Returns tensor parallel rank t's part of matrix k of a parameter. Its first row is `first`.
Part PartOf(const Parameter& parameter, const MuonMatrix& matrix, int k, int64_t first, int t) {
  const ParameterSharding& sharding = parameter.sharding;
  if (sharding.shards.empty()) return {0, matrix.numel(), first * matrix.cols, t > 0};
  const std::vector<ShardSlice>& slices = sharding.shards[t];
  if (sharding.axis == 1) {
    BURST_CHECK_EQ(slices.size(), 1u);
    const int64_t rows = matrix.rows;
    return {slices[0].begin * rows, slices[0].length * rows, 0, t % slices[0].replicas != 0};
  }
  int64_t before = 0;  // rows of the shard's other matrices
  for (int j = 0; j < k; ++j) before += slices[j].length;
  const ShardSlice& own = slices[k];
  return {(own.begin - first) * matrix.cols, own.length * matrix.cols, before * matrix.cols,
          t % own.replicas != 0};
}

}  // namespace

bool UpdatedByMuon(const Parameter& parameter) {
  return parameter.full_shape.size() == 2 && absl::StartsWith(parameter.name, "layers.");
}

int64_t MuonNumel(absl::Span<const Parameter> parameters) {
  int64_t numel = 0;
  for (const Parameter& p : parameters) {
    if (UpdatedByMuon(p)) numel += p.full_shape[0] * p.full_shape[1];
  }
  return numel;
}

std::vector<MuonMatrix> MuonMatrices(const ParameterList& parameters, const ModelConfig& model) {
  std::vector<MuonMatrix> matrices;
  for (int i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    if (!UpdatedByMuon(parameter)) continue;
    const ParameterSharding& sharding = parameter.sharding;
    const std::vector<int64_t> rows = RowsOf(parameter, model);
    int64_t first = 0;
    for (size_t k = 0; k < rows.size(); ++k) {
      const bool by_columns = !sharding.shards.empty() && sharding.axis == 1;
      MuonMatrix matrix{rows[k], parameter.full_shape[1], by_columns ? sharding.ranks : 1, {}};
      for (int rank = 0; rank < parameters.sharding().ranks; ++rank) {
        const ParameterPiece piece = parameters.PieceOf(i, rank);
        for (int t = 0; t < sharding.ranks; ++t) {
          const Part part = PartOf(parameter, matrix, static_cast<int>(k), first, t);
          const int64_t begin = std::max(part.at, piece.begin);
          const int64_t end = std::min(part.at + part.length, piece.begin + piece.length);
          if (begin >= end) {
            matrix.pieces.emplace_back();
            continue;
          }
          matrix.pieces.push_back({part.begin + begin - part.at, end - begin,
                                   piece.at + begin - piece.begin, part.copy});
        }
      }
      matrices.push_back(std::move(matrix));
      first += rows[k];
    }
  }
  return matrices;
}

}  // namespace burst
