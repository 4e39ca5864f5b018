// Operators that exist for CUDA only: the fused cells of LSTM and GRU, and RMS norm's gradient. On
// the CPU torch computes the same from smaller operators; so do these.
#pragma once

#include "simgpu/kernels/operator_facts.h"

namespace trae_mem::simgpu {

void lstm_cell(const OperatorFacts& facts, torch::jit::Stack& stack, const at::Generator&);
void lstm_cell_backward(const OperatorFacts& facts, torch::jit::Stack& stack, const at::Generator&);
void gru_cell(const OperatorFacts& facts, torch::jit::Stack& stack, const at::Generator&);
void gru_cell_backward(const OperatorFacts& facts, torch::jit::Stack& stack, const at::Generator&);
void rms_norm_backward(const OperatorFacts& facts, torch::jit::Stack& stack, const at::Generator&);

}  // namespace trae_mem::simgpu
