// Shorthands for absl::Status and absl::StatusOr, which report errors that a user or the outside
// world can cause.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define BURST_RETURN_IF_ERROR(expression)        \
  do {                                           \
    ::absl::Status burst_status = (expression);  \
    if (!burst_status.ok()) return burst_status; \
  } while (false)

#define BURST_CONCAT_INNER_(a, b) a##b
#define BURST_CONCAT_(a, b) BURST_CONCAT_INNER_(a, b)

// BURST_ASSIGN_OR_RETURN(Tensor t, LoadTensor(path));
#define BURST_ASSIGN_OR_RETURN(declaration, expression) \
  BURST_ASSIGN_OR_RETURN_(BURST_CONCAT_(burst_statusor_, __LINE__), declaration, expression)
#define BURST_ASSIGN_OR_RETURN_(statusor, declaration, expression) \
  auto statusor = (expression);                                    \
  if (!statusor.ok()) return statusor.status();                    \
  declaration = *std::move(statusor)
