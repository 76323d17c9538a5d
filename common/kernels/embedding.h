// The embedding: a row of a table for each token.
#pragma once

#include <cstdint>

#include "device/tensor.h"

namespace pentatron {

// out[r] = table[tokens[r] - first_token]. The table holds rows [first_token, first_token + table.rows) of
// the vocabulary; out[r] is zero if the token is not among them.
void embedding_forward(Tensor table /*[vocabulary, d]*/, const int32_t* tokens /*[rows]*/, int first_token,
                       Tensor out /*[rows, d]*/, cudaStream_t stream);

// gradient[t] (+)= the sum of d_out[r] over the rows r with token t. `by_token` lists the rows sorted by
// token (stable). So one block sums all rows of a token, in a fixed order.
void embedding_backward(Tensor d_out /*[rows, d]*/, const int32_t* tokens /*[rows]*/,
                        const int32_t* by_token /*[rows]*/, int first_token,
                        Gradient gradient /*[vocabulary, d]*/, cudaStream_t stream);

}  // namespace pentatron
