// Copy tokens between an engine's paged KV cache and packed cross-layer blocks in their slots.
//
//   engine: one base address for each (layer, plane)          slot: one run of bytes, heads
//   outermost base[plane] ─► [block]...[token]...[head] row              slot ─► [head] [layer,
//   plane] [token] row
//                   any strides; a row is contiguous                    offset[plane] + head +
//                   token strides
//
// A span is the unit of work that the host lists: tokens that follow each other on both sides,
// inside one engine block and one stored block. Skipped prefixes, partial last blocks, unlike block
// sizes and negative ids are all settled in that list: a token that must not be touched is in no
// span, so no thread ever has its address. Origin: ours.
//
// Threads: `lanes` neighbouring threads copy one (span, plane); groups of them stride over all
// pairs, so the grid may be of any size and a small one leaves multiprocessors to the model. Within
// a pair neighbouring threads copy neighbouring words of the engine; each thread has kUnroll loads
// in flight before its first store. Loads and stores stream (.cs): nothing here is read twice.
//
// Offsets are 64 bits wide wherever they can span more than one block of one plane.

struct Span {
    long long block;         // engine block
    long long slot;          // slot of the stored block
    long long engine_token;  // first token, within the engine block
    long long slot_token;    // the same token, within the stored block
    long long num_tokens;
};

struct Strides {  // all in bytes
    long long engine_block;
    long long engine_head;
    long long engine_token;
    long long slot;
    long long slot_head;
    long long slot_token;
};

constexpr unsigned kUnroll = 4;

template <typename Word, bool kToSlots>
__device__ __forceinline__ void copy_spans(const long long* __restrict__ engine_bases,
                                           const long long* __restrict__ slot_offsets,
                                           unsigned num_planes, const Span* __restrict__ spans,
                                           unsigned num_spans, long long slots, Strides strides,
                                           unsigned num_heads, unsigned row_words, unsigned lanes) {
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned num_groups = gridDim.x * (blockDim.x / lanes);
    const unsigned lane = thread % lanes;
    const unsigned num_items = num_spans * num_planes;  // the host keeps it below 2^31
    const long long row_bytes = static_cast<long long>(row_words) * sizeof(Word);
    const bool rows_adjoin = strides.engine_token == row_bytes && strides.slot_token == row_bytes;

    for (unsigned item = thread / lanes; item < num_items; item += num_groups) {
        const Span span = spans[item / num_planes];
        const unsigned plane = item % num_planes;
        const long long engine = engine_bases[plane] + span.block * strides.engine_block +
                                 span.engine_token * strides.engine_token;
        const long long slot = slots + slot_offsets[plane] + span.slot * strides.slot +
                               span.slot_token * strides.slot_token;
        // Where tokens follow each other on both sides, all of a head's tokens are one long row.
        const unsigned num_tokens = static_cast<unsigned>(span.num_tokens);
        const unsigned words = rows_adjoin ? row_words * num_tokens : row_words;
        const unsigned total = row_words * num_tokens * num_heads;

        for (unsigned first = lane; first < total; first += lanes * kUnroll) {
            Word held[kUnroll];
            long long targets[kUnroll];
#pragma unroll
            for (unsigned step = 0; step < kUnroll; ++step) {
                const unsigned index = first + step * lanes;
                if (index < total) {
                    const unsigned row = index / words;
                    const unsigned head = row % num_heads;
                    const unsigned token = row / num_heads;
                    const long long inside =
                        static_cast<long long>(index - row * words) * sizeof(Word);
                    const long long at_engine =
                        engine + head * strides.engine_head + token * strides.engine_token + inside;
                    const long long at_slot =
                        slot + head * strides.slot_head + token * strides.slot_token + inside;
                    targets[step] = kToSlots ? at_slot : at_engine;
                    held[step] =
                        __ldcs(reinterpret_cast<const Word*>(kToSlots ? at_engine : at_slot));
                }
            }
#pragma unroll
            for (unsigned step = 0; step < kUnroll; ++step) {
                if (first + step * lanes < total) {
                    __stcs(reinterpret_cast<Word*>(targets[step]), held[step]);
                }
            }
        }
    }
}

template <typename Word>
__global__ void __launch_bounds__(256)
    pack_spans(const long long* engine_bases, const long long* slot_offsets, unsigned num_planes,
               const Span* spans, unsigned num_spans, long long slots, long long engine_block,
               long long engine_head, long long engine_token, long long slot_stride,
               long long slot_head, long long slot_token, unsigned num_heads, unsigned row_words,
               unsigned lanes) {
    const Strides strides = {engine_block, engine_head, engine_token,
                             slot_stride,  slot_head,   slot_token};
    copy_spans<Word, true>(engine_bases, slot_offsets, num_planes, spans, num_spans, slots, strides,
                           num_heads, row_words, lanes);
}

template <typename Word>
__global__ void __launch_bounds__(256)
    unpack_spans(const long long* engine_bases, const long long* slot_offsets, unsigned num_planes,
                 const Span* spans, unsigned num_spans, long long slots, long long engine_block,
                 long long engine_head, long long engine_token, long long slot_stride,
                 long long slot_head, long long slot_token, unsigned num_heads, unsigned row_words,
                 unsigned lanes) {
    const Strides strides = {engine_block, engine_head, engine_token,
                             slot_stride,  slot_head,   slot_token};
    copy_spans<Word, false>(engine_bases, slot_offsets, num_planes, spans, num_spans, slots,
                            strides, num_heads, row_words, lanes);
}
