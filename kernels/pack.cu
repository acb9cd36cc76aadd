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
// Threads: a thread keeps to one word of a span in a plane and copies it in kPlanes planes, so
// where the word lies is worked out once for all of them, and all loads are in flight before the
// first store. `lanes` neighbouring threads copy neighbouring words of the slot; as many of them as
// a plane of a span needs are its tiles. Tiles are dealt out in the order of the slots: memory is
// fast where what is in flight at one time lies together. The grid may be of any size; a small one
// leaves multiprocessors to the model.
//
// Offsets are 64 bits wide wherever they can span more than one block of one plane.

struct Span {
    long long block;         // engine block
    long long slot;          // slot of the stored block
    long long engine_token;  // first token, within the engine block
    long long slot_token;    // the same token, within the stored block
    long long num_tokens;
};

struct Divisor {  // of numbers below 2^31, without a division
    unsigned value;
    unsigned multiplier;
    unsigned shift;
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
    unsigned num_heads;
    unsigned num_units;  // tiles of all spans in all groups of kPlanes planes; below 2^31
    Divisor lanes;
    Divisor tiles;   // of one span in one plane
    Divisor groups;  // of planes
    Divisor num_spans;
    Divisor head_words;  // of the longest span
    Divisor row_words;
};

constexpr unsigned kPlanes = 4;

__device__ __forceinline__ unsigned quotient(unsigned dividend, const Divisor& divisor) {
    return (__umulhi(dividend, divisor.multiplier) + dividend) >> divisor.shift;
}

template <typename Word, bool kToSlots>
__device__ __forceinline__ void copy_spans(const Copy& copy) {
    const unsigned units_at_once = quotient(blockDim.x, copy.lanes);
    const unsigned turn = quotient(threadIdx.x, copy.lanes);
    const unsigned lane = threadIdx.x - turn * copy.lanes.value;
    if (turn >= units_at_once) {
        return;  // the host rounds thread blocks up to whole warps
    }
    const long long* const sources = kToSlots ? copy.engine_bases : copy.slot_offsets;
    const long long* const targets = kToSlots ? copy.slot_offsets : copy.engine_bases;

    for (unsigned unit = blockIdx.x * units_at_once + turn; unit < copy.num_units;
         unit += gridDim.x * units_at_once) {
        const unsigned pair = quotient(unit, copy.tiles);
        const unsigned tile = unit - pair * copy.tiles.value;
        const Divisor& inner = kToSlots ? copy.groups : copy.num_spans;
        const unsigned slow = quotient(pair, inner);
        const unsigned fast = pair - slow * inner.value;
        const unsigned first_plane = (kToSlots ? fast : slow) * kPlanes;
        const Span span = copy.spans[kToSlots ? slow : fast];

        const unsigned index = tile * copy.lanes.value + lane;
        const unsigned head = quotient(index, copy.head_words);
        const unsigned in_head = index - head * copy.head_words.value;
        const unsigned token = quotient(in_head, copy.row_words);
        if (head >= copy.num_heads || token >= span.num_tokens) {
            continue;
        }
        const long long inside =
            static_cast<long long>(in_head - token * copy.row_words.value) * sizeof(Word);
        const long long engine = span.block * copy.engine_block +
                                 (span.engine_token + token) * copy.engine_token +
                                 head * copy.engine_head + inside;
        const long long slot = copy.slots + span.slot * copy.slot_stride +
                               (span.slot_token + token) * copy.slot_token + head * copy.slot_head +
                               inside;
        const long long source = kToSlots ? engine : slot;
        const long long target = kToSlots ? slot : engine;

        Word held[kPlanes];
#pragma unroll
        for (unsigned step = 0; step < kPlanes; ++step) {
            if (first_plane + step < copy.num_planes) {
                held[step] =
                    __ldcg(reinterpret_cast<const Word*>(sources[first_plane + step] + source));
            }
        }
#pragma unroll
        for (unsigned step = 0; step < kPlanes; ++step) {
            if (first_plane + step < copy.num_planes) {
                __stcg(reinterpret_cast<Word*>(targets[first_plane + step] + target), held[step]);
            }
        }
    }
}

template <typename Word>
__global__ void __launch_bounds__(256, 6) pack_spans(const Copy copy) {
    copy_spans<Word, true>(copy);
}

template <typename Word>
__global__ void __launch_bounds__(256, 6) unpack_spans(const Copy copy) {
    copy_spans<Word, false>(copy);
}
