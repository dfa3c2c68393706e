// Lists the matrices of a model that Muon updates, and which rank has which of their elements.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "model/config.h"
#include "model/parameters.h"
#include "train/optimizer/muon.h"

namespace burst {

// Returns whether Muon updates a parameter: a matrix of the layers.
bool UpdatedByMuon(const Parameter& parameter);

// Returns the number of elements of whole parameters that Muon updates.
int64_t MuonNumel(absl::Span<const Parameter> parameters);

// Returns the matrices of the layers that `parameters` has. Queries, keys and values are three
// matrices, and so are gate and up two. Piece r * T + t is of rank r of StateSharding and rank t of
// T tensor parallel ranks.
std::vector<MuonMatrix> MuonMatrices(const ParameterList& parameters, const ModelConfig& model);

}  // namespace burst
