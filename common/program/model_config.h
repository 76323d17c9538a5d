// config.json, which says of a folder of weights which model they belong to, as Hugging Face's transformers
// writes and reads it.
#pragma once

#include <string>

#include "model/config.h"

namespace pentatron {

// Takes the model's sizes and its experts from FOLDER/config.json. Throws UsageError, naming `option`, if the
// file can't be read, or if it asks for something that would change the result and that is not here.
void read_model_config(const std::string& option, const std::string& folder, ModelConfig& model);

// The text of config.json. sequence_length: what the model was trained on; type: of the weights, in PyTorch's
// words, such as "float32".
std::string model_config_text(const ModelConfig& model, int sequence_length, const std::string& type);

// The first size in which two models differ, such as "--layers is 8, and was 4", or nothing.
std::string model_difference(const ModelConfig& model, const ModelConfig& saved);

}  // namespace pentatron
