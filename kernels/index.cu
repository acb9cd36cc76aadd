// Translate between token slots and pages of a paged KV cache, for a ragged batch of sequences.
//
//   sequence i owns tokens token_starts[i] .. token_starts[i + 1] of a flat list of slots, and
//   entries page_starts[i] .. page_starts[i + 1] of a flat list of pages; slot = page * page_size +
//   offset
//
// One thread block takes one sequence at a time and strides over the batch. A sequence without
// tokens owns nothing on either side and no other sequence's entries move for it. Every bound of an
// output is in the output's own unit, so nothing is written past a sequence's last page or token.
// Page 0 is a page like any other; what is not there is -1. Inputs are only read. Origin: ours.

template <typename Index>
__global__ void slots_to_pages(const Index* __restrict__ slots,
                               const long long* __restrict__ token_starts,
                               const long long* __restrict__ page_starts, unsigned num_sequences,
                               unsigned page_size, Index* __restrict__ pages) {
    for (unsigned sequence = blockIdx.x; sequence < num_sequences; sequence += gridDim.x) {
        const long long begin = token_starts[sequence], end = token_starts[sequence + 1];
        const long long first_page = page_starts[sequence];
        const long long num_pages = page_starts[sequence + 1] - first_page;
        for (long long page = threadIdx.x; page < num_pages; page += blockDim.x) {
            const long long from = begin + page * page_size;
            const long long to = from + page_size < end ? from + page_size : end;
            const Index first = slots[from];
            // A page is only named when all tokens that belong in it lie there, each at its own
            // offset.
            bool whole = first >= 0 && first % static_cast<Index>(page_size) == 0;
            for (long long token = from + 1; token < to; ++token) {
                whole = whole && slots[token] == first + static_cast<Index>(token - from);
            }
            pages[first_page + page] =
                whole ? first / static_cast<Index>(page_size) : static_cast<Index>(-1);
        }
    }
}

template <typename Index>
__global__ void pages_to_slots(const Index* __restrict__ pages,
                               const long long* __restrict__ page_starts,
                               const long long* __restrict__ token_starts, unsigned num_sequences,
                               unsigned page_size, Index* __restrict__ slots) {
    for (unsigned sequence = blockIdx.x; sequence < num_sequences; sequence += gridDim.x) {
        const long long begin = token_starts[sequence];
        const long long num_tokens = token_starts[sequence + 1] - begin;
        for (long long token = threadIdx.x; token < num_tokens; token += blockDim.x) {
            const Index page = pages[page_starts[sequence] + token / page_size];
            slots[begin + token] = page < 0 ? static_cast<Index>(-1)
                                            : page * static_cast<Index>(page_size) +
                                                  static_cast<Index>(token % page_size);
        }
    }
}

// Rows of a padded page table, named by row_ids, into one ragged list.
template <typename Index>
__global__ void repack_pages(const Index* __restrict__ table, long long row_stride,
                             const long long* __restrict__ row_ids,
                             const long long* __restrict__ page_starts, unsigned num_sequences,
                             Index* __restrict__ pages) {
    for (unsigned sequence = blockIdx.x; sequence < num_sequences; sequence += gridDim.x) {
        const long long first_page = page_starts[sequence];
        const long long num_pages = page_starts[sequence + 1] - first_page;
        const Index* row = table + row_ids[sequence] * row_stride;
        for (long long page = threadIdx.x; page < num_pages; page += blockDim.x) {
            pages[first_page + page] = row[page];
        }
    }
}

// Tokens in each sequence's last page, 0 .. page_size, and the slot of its last token; 0 and -1
// when empty.
template <typename Index>
__global__ void last_pages(const Index* __restrict__ slots,
                           const long long* __restrict__ token_starts, unsigned num_sequences,
                           unsigned page_size, Index* __restrict__ last_lengths,
                           Index* __restrict__ last_slots) {
    for (unsigned sequence = blockIdx.x * blockDim.x + threadIdx.x; sequence < num_sequences;
         sequence += gridDim.x * blockDim.x) {
        const long long end = token_starts[sequence + 1];
        const long long num_tokens = end - token_starts[sequence];
        last_lengths[sequence] =
            num_tokens == 0 ? 0 : static_cast<Index>((num_tokens - 1) % page_size + 1);
        last_slots[sequence] = num_tokens == 0 ? static_cast<Index>(-1) : slots[end - 1];
    }
}
