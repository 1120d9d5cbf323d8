// Decode: few queries against many keys are bound by memory, so a query reads K, V and the mixes once.
// Workers take chunks of keys of one query, all heads at once, in phases:
// 1. scores, and the part of the chunk in the inner product of the first mix;
// 2. the first mix, and the part of the chunk in the norm;
// 3. the activation, and the part of the chunk in the inner product of the second mix;
// 4. the second mix, and the chunk's part of the readout.
// 5. The parts of the readout are added, head by head. All parts are added in the order of their chunks, so
//    that the result does not depend on timing.
#pragma once

#include "functions.h"
#include "kernels.h"
#include "mix.h"
#include "rows.h"
#include "scratch.h"

namespace hypermlp {

// Keys and values that precede those of the problem in every context, in T. Keys differ by query if they are
// rotated.
template <typename T>
struct Prefix {
    int64_t count = 0;
    const T* keys = nullptr;    // [queries of the batch or 1, count, branches, qk_dim]
    int64_t key_row = 0;        // stride of the queries; 0 if they share the keys
    const T* values = nullptr;  // [count, heads, vo_dim]
};

// How many threads are worth waking to read so many numbers.
inline int64_t useful_threads(int64_t threads, int64_t numbers) {
    constexpr int64_t kNumbers = 1 << 17;  // read in about the time in which a thread wakes up
    return std::min(threads, numbers / kNumbers + 1);
}

template <typename T>
class Decode {
  public:
    static constexpr int64_t kChunk = 128;  // keys
    static constexpr size_t kPhases = 5;

    static size_t need(const Problem<T>& p, int64_t prefix) {
        const Decode d(p, prefix);
        return Arena::need<T>(d.scores_size()) + Arena::need<T>(d.parts() * d.branches_ * p.mix1.rank) +
               Arena::need<T>(d.parts() * p.heads * p.mix2.rank) + Arena::need<T>(d.parts() * p.heads) +
               Arena::need<T>(d.parts() * d.rank()) + Arena::need<T>(d.parts() * p.heads * p.vo_dim);
    }
    // queries: [batch, queries, branches, qk_dim], instead of those of the problem. out_gate, [batch,
    // queries, heads, vo_dim], multiplies the output if it has data. Nothing is read before the phases run.
    Decode(const Problem<T>& p, const T* queries, const Output<T>& output, const Strided<const T>& out_gate,
           const Prefix<T>& prefix, Arena& arena)
        : Decode(p, prefix.count) {
        queries_ = queries;
        output_ = output;
        out_gate_ = out_gate;
        prefix_ = prefix;
        scores_ = arena.take<T>(scores_size());
        inner1_ = arena.take<T>(parts() * branches_ * p.mix1.rank);
        inner2_ = arena.take<T>(parts() * p.heads * p.mix2.rank);
        squares_ = arena.take<T>(parts() * p.heads);
        gated_ = arena.take<T>(parts() * rank());
        readout_ = arena.take<T>(parts() * p.heads * p.vo_dim);
    }

    // The numbers that the phases read.
    int64_t reads() const {
        return rows_ * room_ *
               (branches_ * (p_.qk_dim + 2 * p_.mix1.rank) + p_.heads * (p_.vo_dim + 2 * p_.mix2.rank));
    }
    int64_t count(size_t phase) const { return phase + 1 < kPhases ? parts() : rows_ * p_.heads; }
    void run(size_t phase, int64_t i) const {
        if (phase + 1 == kPhases) return reduce(i / p_.heads, i % p_.heads);
        const Part part = part_of(i / chunks_, i % chunks_);
        switch (phase) {
            case 0: return scores(part);
            case 1: return mixed_scores(part);
            case 2: return activation(part);
            default: return readout(part);
        }
    }

  private:
    // The visible keys of one query in one chunk. Indices count the prefix, which ends where the query's own
    // keys begin: the query sees [start, end), and the first prefix_.count of them are the prefix.
    struct Part {
        int64_t row, batch, query, index;  // index: of the part among all
        int64_t start, end, from, to;

        int64_t size() const { return std::max<int64_t>(0, to - from); }
    };

    Decode(const Problem<T>& p, int64_t prefix)
        : p_(p),
          rows_(p.batch * p.queries),
          chunks_((p.keys + prefix + kChunk - 1) / kChunk),
          branches_(p.branches()),
          room_(p.keys + prefix) {}

    int64_t parts() const { return rows_ * chunks_; }
    int64_t rank() const { return std::max(p_.mix1.rank, p_.mix2.rank); }
    int64_t scores_size() const { return rows_ * branches_ * room_; }
    T* score(int64_t row, int64_t branch) const { return scores_ + (row * branches_ + branch) * room_; }

    Part part_of(int64_t row, int64_t chunk) const {
        Part part;
        part.row = row;
        part.batch = row / p_.queries;
        part.query = row % p_.queries;
        part.index = row * chunks_ + chunk;
        part.start = p_.starts ? p_.starts[row] : 0;
        part.end = p_.keys - p_.queries + part.query + 1;
        if (part.end > part.start) part.end += prefix_.count;  // a query that sees nothing has no prefix
        part.from = std::max(part.start, chunk * kChunk);
        part.to = std::min(part.end, (chunk + 1) * kChunk);
        return part;
    }

    // Call use(first, index, count) for the part's keys in the prefix, then for those of the problem. `first`
    // counts from the first key of the prefix, or of the problem.
    template <typename UsePrefix, typename UseKeys>
    void split(const Part& part, const UsePrefix& use_prefix, const UseKeys& use_keys) const {
        const int64_t border =
            std::clamp(part.start + prefix_.count, part.from, std::max(part.from, part.to));
        if (part.from < border) use_prefix(part.from - part.start, part.from, border - part.from);
        if (border < part.to) use_keys(border - prefix_.count, border, part.to - border);
    }

    void scores(const Part& part) const {
        constexpr int64_t kBlock = kLanes<T>;  // keys
        const int64_t width = branches_ * p_.qk_dim;
        const T* q = queries_ + part.row * width;
        const auto add = [&](const auto* keys, int64_t token, int64_t head, int64_t index, int64_t count) {
            for (int64_t i = 0; i < count; i += kBlock)
                head_dots(q, branches_, p_.qk_dim, keys + i * token, token, head, std::min(kBlock, count - i),
                          score(part.row, 0) + index + i, room_);
        };
        split(
            part,
            [&](int64_t first, int64_t index, int64_t count) {
                add(prefix_.keys + part.row * prefix_.key_row + first * width, width, p_.qk_dim, index,
                    count);
            },
            [&](int64_t first, int64_t index, int64_t count) {
                p_.k.visit(
                    [&](const auto& k) { add(k.at(part.batch, first), k.token, k.head, index, count); });
            });
        for (int64_t g = 0; g < branches_; ++g)
            add_inner(part, p_.mix1, Direction::kStraight, g, score(part.row, g),
                      inner1_ + (part.index * branches_ + g) * p_.mix1.rank);
    }

    void mixed_scores(const Part& part) const {
        for (int64_t g = 0; g < branches_; ++g)
            update(part, p_.mix1, Direction::kStraight, g, score(part.row, g), inner1_, branches_);
        for (int64_t head = 0; head < p_.heads; ++head) {
            const T* gate = score(part.row, head);
            T squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = part.from; i < part.to; ++i) squares += gate[i] * gate[i];
            squares_[part.index * p_.heads + head] = squares;
        }
    }

    T inverse_norm(int64_t row, int64_t head) const {
        T squares = T(p_.eps);
        for (int64_t chunk = 0; chunk < chunks_; ++chunk)
            squares += squares_[(row * chunks_ + chunk) * p_.heads + head];
        return 1 / std::sqrt(squares);
    }

    void activation(const Part& part) const {
        for (int64_t head = 0; head < p_.heads; ++head) {
            T* gate = score(part.row, head);
            const T factor = row_scale(inverse_norm(part.row, head));
            if (p_.glu()) {
                const T* scale = score(part.row, head + p_.heads);
#pragma omp simd
                for (int64_t i = part.from; i < part.to; ++i)
                    gate[i] = positive(gate[i]) * softplus(scale[i]) * factor;
            } else {
#pragma omp simd
                for (int64_t i = part.from; i < part.to; ++i) gate[i] = positive(gate[i]) * factor;
            }
            add_inner(part, p_.mix2, Direction::kTransposed, head, gate,
                      inner2_ + (part.index * p_.heads + head) * p_.mix2.rank);
        }
    }

    void readout(const Part& part) const {
        T* sums = readout_ + part.index * p_.heads * p_.vo_dim;
        std::fill_n(sums, p_.heads * p_.vo_dim, T(0));
        for (int64_t head = 0; head < p_.heads; ++head)
            update(part, p_.mix2, Direction::kTransposed, head, score(part.row, head), inner2_, p_.heads);
        constexpr int64_t kBlock = 8;  // keys: all heads of a block before the next
        const auto add = [&](const auto* values, int64_t token, int64_t head_step, int64_t index,
                             int64_t count) {
            const int64_t block = p_.vo_dim <= kBlock * kLanes<T> ? kBlock : 1;
            for (int64_t i = 0; i < count; i += block)
                for (int64_t head = 0; head < p_.heads; ++head)
                    add_rows(score(part.row, head) + index + i, values + i * token + head * head_step, token,
                             std::min(block, count - i), p_.vo_dim, sums + head * p_.vo_dim);
        };
        split(
            part,
            [&](int64_t first, int64_t index, int64_t count) {
                const int64_t width = p_.heads * p_.vo_dim;
                add(prefix_.values + first * width, width, p_.vo_dim, index, count);
            },
            [&](int64_t first, int64_t index, int64_t count) {
                p_.v.visit(
                    [&](const auto& v) { add(v.at(part.batch, first), v.token, v.head, index, count); });
            });
    }

    void reduce(int64_t row, int64_t head) const {
        const int64_t batch = row / p_.queries, query = row % p_.queries;
        T* out = output_.out.at(batch, query, head);
        const T norm = inverse_norm(row, head), factor = after_scale(norm);
        *output_.kept.at(batch, query, head) = norm;
        std::fill_n(out, p_.vo_dim, T(0));
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
            const T* sum = readout_ + ((row * chunks_ + chunk) * p_.heads + head) * p_.vo_dim;
#pragma omp simd
            for (int64_t d = 0; d < p_.vo_dim; ++d) out[d] += factor * sum[d];
        }
        if (!out_gate_.data) return;
        const T* gate = out_gate_.at(batch, query, head);
        for (int64_t d = 0; d < p_.vo_dim; ++d) out[d] *= gate[d];
    }

    // The first slot of a part, and the way to the next one: in layout "lag" slots run against the keys.
    int64_t first_slot(const Part& part) const {
        return p_.lag() ? part.end - 1 - part.from : part.from - part.start;
    }
    int64_t slot_step() const { return p_.lag() ? -1 : 1; }

    static const Source<T>& left(const Mix<T>& mix, Direction direction) {
        return direction == Direction::kStraight ? mix.left : mix.right;
    }

    // inner <- y left, over the part. y counts like the part.
    void add_inner(const Part& part, const Mix<T>& mix, Direction direction, int64_t head, const T* y,
                   T* inner) const {
        if (!mix.exists()) return;
        std::fill_n(inner, mix.rank, T(0));
        if (part.size() == 0) return;
        left(mix, direction).visit([&](const auto& x) {
            add_rows(y + part.from, x.at(head, first_slot(part)), slot_step() * x.token, part.size(),
                     mix.rank, inner);
        });
    }

    // y <- y R over the part, from the inner products of all parts, [parts, heads, rank].
    void update(const Part& part, const Mix<T>& mix, Direction direction, int64_t head, T* y, const T* inner,
                int64_t heads) const {
        if (!mix.exists() || part.size() == 0) return;
        T *gated = gated_ + part.index * rank(), change[kChunk];
        std::fill_n(gated, mix.rank, T(0));
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
            const T* more = inner + ((part.row * chunks_ + chunk) * heads + head) * mix.rank;
            for (int64_t r = 0; r < mix.rank; ++r) gated[r] += more[r];
        }
        mix.gate.visit([&](const auto& x) {
            const auto* gate = x.at(part.batch, part.query, head);
            for (int64_t r = 0; r < mix.rank; ++r) gated[r] *= widen(gate[r]);
        });
        left(mix, opposite(direction)).visit([&](const auto& x) {
            dots(gated, mix.rank, x.at(head, first_slot(part)), slot_step() * x.token, part.size(), change);
        });
        mix.diag.visit([&](const auto& x) {
            const auto* diag = x.at(head, first_slot(part));
            T* own = y + part.from;
            for (int64_t i = 0; i < part.size(); ++i)
                own[i] += own[i] * widen(diag[i * slot_step()]) + change[i];
        });
    }

    const Problem<T>& p_;
    Output<T> output_;
    Strided<const T> out_gate_;
    Prefix<T> prefix_;
    int64_t rows_, chunks_, branches_, room_;  // rows: (batch, query) pairs
    const T* queries_ = nullptr;               // [rows, branches, qk_dim]
    T* scores_ = nullptr;                      // [rows, branches, room]
    T* inner1_ = nullptr;                      // [rows, chunks, branches, rank]
    T* inner2_ = nullptr;                      // [rows, chunks, heads, rank]
    T* squares_ = nullptr;                     // [rows, chunks, heads]
    T* gated_ = nullptr;                       // [rows, chunks, rank]
    T* readout_ = nullptr;                     // [rows, chunks, heads, vo_dim]
};

}  // namespace hypermlp
