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
// a pair neighbouring threads copy neighbouring words of the slot; each thread has kUnroll loads
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

struct Copy {                       // one launch; strides in bytes
    const long long* engine_bases;  // [num_planes]
    const long long* slot_offsets;  // [num_planes]
    const Span* spans;              // [num_spans]
    long long slots;                // address that slot 0 has, or would have
    long long engine_block;
    long long engine_head;
    long long engine_token;
    long long slot_stride;
    long long slot_head;
    long long slot_token;
    unsigned num_planes;
    unsigned num_spans;
    unsigned num_heads;
    unsigned row_words;
    unsigned lanes;
};

constexpr unsigned kUnroll = 4;

template <typename Word, bool kToSlots>
__device__ __forceinline__ void copy_spans(const Copy& copy) {
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned num_groups = gridDim.x * (blockDim.x / copy.lanes);
    const unsigned lane = thread % copy.lanes;
    const unsigned num_items = copy.num_spans * copy.num_planes;  // the host keeps it below 2^31
    const long long row_bytes = static_cast<long long>(copy.row_words) * sizeof(Word);
    const bool rows_adjoin = copy.engine_token == row_bytes && copy.slot_token == row_bytes;

    for (unsigned item = thread / copy.lanes; item < num_items; item += num_groups) {
        const Span span = copy.spans[item / copy.num_planes];
        const unsigned plane = item % copy.num_planes;
        char* engine =
            reinterpret_cast<char*>(copy.engine_bases[plane] + span.block * copy.engine_block +
                                    span.engine_token * copy.engine_token);
        char* slot = reinterpret_cast<char*>(copy.slots + copy.slot_offsets[plane] +
                                             span.slot * copy.slot_stride +
                                             span.slot_token * copy.slot_token);
        // Where tokens follow each other on both sides, all of a head's tokens are one long row.
        const unsigned head_words = copy.row_words * static_cast<unsigned>(span.num_tokens);
        const unsigned row_words = rows_adjoin ? head_words : copy.row_words;
        const unsigned total = head_words * copy.num_heads;

        for (unsigned first = lane; first < total; first += copy.lanes * kUnroll) {
            Word held[kUnroll];
            char* targets[kUnroll];
#pragma unroll
            for (unsigned step = 0; step < kUnroll; ++step) {
                const unsigned index = first + step * copy.lanes;
                if (index < total) {
                    const unsigned head = index / head_words;
                    const unsigned in_head = index - head * head_words;
                    const unsigned token = in_head / row_words;
                    const long long inside =
                        static_cast<long long>(in_head - token * row_words) * sizeof(Word);
                    char* at_engine =
                        engine + head * copy.engine_head + token * copy.engine_token + inside;
                    char* at_slot = slot + head * copy.slot_head + token * copy.slot_token + inside;
                    targets[step] = kToSlots ? at_slot : at_engine;
                    held[step] =
                        __ldcs(reinterpret_cast<const Word*>(kToSlots ? at_engine : at_slot));
                }
            }
#pragma unroll
            for (unsigned step = 0; step < kUnroll; ++step) {
                if (first + step * copy.lanes < total) {
                    __stcs(reinterpret_cast<Word*>(targets[step]), held[step]);
                }
            }
        }
    }
}

template <typename Word>
__global__ void __launch_bounds__(256) pack_spans(const Copy copy) {
    copy_spans<Word, true>(copy);
}

template <typename Word>
__global__ void __launch_bounds__(256) unpack_spans(const Copy copy) {
    copy_spans<Word, false>(copy);
}
