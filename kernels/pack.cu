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
// Threads: a thread copies kWords words, all loads in flight before the first store. Where a plane
// of a span is long they lie in that plane, `lanes` words apart (kInside); where it is short they
// are one word each of as many planes, so that where the word lies is worked out once for all of
// them. `lanes` neighbouring threads copy neighbouring words of the slot; as many of them as a
// plane of a span needs are its tiles. Tiles are dealt out strip by strip, a strip being one plane,
// a few (neighbours, or far apart) or all: memory is fast where what is in flight at one time lies
// together, on both sides. The grid may be of any size; a small one leaves multiprocessors to the
// model.
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
    unsigned num_units;   // tiles of all spans in all strips; below 2^31
    unsigned next_strip;  // groups of planes from the first one of a strip to that of the next
    unsigned next_group;  // and from one of a strip to its next
    Divisor lanes;
    Divisor tiles;        // of one span in one plane
    Divisor strip;        // groups of planes in a strip; a group is what a thread has words of
    Divisor strip_pairs;  // of a span and a group, in a strip
    Divisor head_words;   // of the longest span
    Divisor row_words;
};

__device__ __forceinline__ unsigned quotient(unsigned dividend, const Divisor& divisor) {
    return (__umulhi(dividend, divisor.multiplier) + dividend) >> divisor.shift;
}

struct Place {  // of one byte on both sides
    long long engine;
    long long slot;
};

__device__ __forceinline__ Place operator+(const Place& one, const Place& other) {
    return {one.engine + other.engine, one.slot + other.slot};
}

// Where a span begins in a plane, without what is the same for all planes of a launch.
__device__ __forceinline__ Place place_of_span(const Copy& copy, const Span& span) {
    return {span.block * copy.engine_block + span.engine_token * copy.engine_token,
            copy.slots + span.slot * copy.slot_stride + span.slot_token * copy.slot_token};
}

__device__ __forceinline__ Place place_of_plane(const Copy& copy, unsigned plane) {
    return {copy.engine_bases[plane], copy.slot_offsets[plane]};
}

// Where a word of a span lies within it; whether there is such a word.
template <typename Word>
__device__ __forceinline__ bool place_of_word(const Copy& copy, unsigned num_tokens, unsigned index,
                                              Place& place) {
    const unsigned head = quotient(index, copy.head_words);
    const unsigned in_head = index - head * copy.head_words.value;
    const unsigned token = quotient(in_head, copy.row_words);
    const unsigned inside = (in_head - token * copy.row_words.value) * sizeof(Word);
    place = {token * copy.engine_token + head * copy.engine_head + inside,
             token * copy.slot_token + head * copy.slot_head + inside};
    return head < copy.num_heads && token < num_tokens;
}

template <typename Word, bool kToSlots>
__device__ __forceinline__ Word load_word(const Place& place) {
    return __ldcg(reinterpret_cast<const Word*>(kToSlots ? place.engine : place.slot));
}

template <typename Word, bool kToSlots>
__device__ __forceinline__ void store_word(const Place& place, const Word& word) {
    __stcg(reinterpret_cast<Word*>(kToSlots ? place.slot : place.engine), word);
}

template <typename Word, bool kToSlots, bool kInside, unsigned kWords>
__device__ __forceinline__ void copy_unit(const Copy& copy, unsigned unit, unsigned lane) {
    const unsigned pair = quotient(unit, copy.tiles);
    const unsigned tile = unit - pair * copy.tiles.value;
    const unsigned strip = quotient(pair, copy.strip_pairs);
    const unsigned in_strip = pair - strip * copy.strip_pairs.value;
    const unsigned listed = quotient(in_strip, copy.strip);
    const unsigned turn = in_strip - listed * copy.strip.value;
    const unsigned group = strip * copy.next_strip + turn * copy.next_group;
    const unsigned first_plane = group * (kInside ? 1 : kWords);
    if (first_plane >= copy.num_planes) {
        return;  // some strips may have fewer
    }
    const Span& span = copy.spans[listed];
    const unsigned num_tokens = static_cast<unsigned>(span.num_tokens);
    const Place begin = place_of_span(copy, span);

    Word held[kWords];
    if (kInside) {
        const Place in_plane = begin + place_of_plane(copy, first_plane);
        Place places[kWords];
        bool is_word[kWords];
#pragma unroll
        for (unsigned step = 0; step < kWords; ++step) {
            const unsigned index = (tile * kWords + step) * copy.lanes.value + lane;
            is_word[step] = place_of_word<Word>(copy, num_tokens, index, places[step]);
            places[step] = places[step] + in_plane;
        }
#pragma unroll
        for (unsigned step = 0; step < kWords; ++step) {
            if (is_word[step]) {
                held[step] = load_word<Word, kToSlots>(places[step]);
            }
        }
#pragma unroll
        for (unsigned step = 0; step < kWords; ++step) {
            if (is_word[step]) {
                store_word<Word, kToSlots>(places[step], held[step]);
            }
        }
        return;
    }
    Place place;
    if (!place_of_word<Word>(copy, num_tokens, tile * copy.lanes.value + lane, place)) {
        return;
    }
    place = place + begin;
#pragma unroll
    for (unsigned step = 0; step < kWords; ++step) {
        if (first_plane + step < copy.num_planes) {
            held[step] =
                load_word<Word, kToSlots>(place + place_of_plane(copy, first_plane + step));
        }
    }
#pragma unroll
    for (unsigned step = 0; step < kWords; ++step) {
        if (first_plane + step < copy.num_planes) {
            store_word<Word, kToSlots>(place + place_of_plane(copy, first_plane + step),
                                       held[step]);
        }
    }
}

template <typename Word, bool kToSlots, bool kInside, unsigned kWords>
__device__ __forceinline__ void copy_spans(const Copy& copy) {
    const unsigned units_at_once = quotient(blockDim.x, copy.lanes);
    const unsigned turn = quotient(threadIdx.x, copy.lanes);
    const unsigned lane = threadIdx.x - turn * copy.lanes.value;
    if (turn >= units_at_once) {
        return;  // the host rounds thread blocks up to whole warps
    }
    for (unsigned unit = blockIdx.x * units_at_once + turn; unit < copy.num_units;
         unit += gridDim.x * units_at_once) {
        copy_unit<Word, kToSlots, kInside, kWords>(copy, unit, lane);
    }
}

// kThreads and kCtas: the most threads of a thread block, and thread blocks of a multiprocessor
// that registers have to do for.
template <typename Word, bool kInside, unsigned kWords, unsigned kThreads, unsigned kCtas>
__global__ void __launch_bounds__(kThreads, kCtas) pack_spans(const Copy copy) {
    copy_spans<Word, true, kInside, kWords>(copy);
}

template <typename Word, bool kInside, unsigned kWords, unsigned kThreads, unsigned kCtas>
__global__ void __launch_bounds__(kThreads, kCtas) unpack_spans(const Copy copy) {
    copy_spans<Word, false, kInside, kWords>(copy);
}
