package ring

// kept is the rows that a stage computed for a session, from position 0. Memory is taken by
// pages as rows come.
type kept struct {
	width  int
	pages  [][]float32
	tokens []int32
	flags  []uint8
}

// pageBytes is about the size of a page.
const pageBytes = 256 << 10

func (k *kept) pageRows() int { return max(pageBytes/(4*k.width), 1) }

func (k *kept) len() int { return len(k.tokens) }

func (k *kept) row(i int) []float32 {
	n := k.pageRows()
	return k.pages[i/n][i%n*k.width:][:k.width]
}

func (k *kept) add(row []float32, token int32, flags uint8) {
	n, i := k.pageRows(), len(k.tokens)
	if i/n == len(k.pages) {
		k.pages = append(k.pages, make([]float32, n*k.width))
	}
	k.tokens, k.flags = append(k.tokens, token), append(k.flags, flags)
	copy(k.row(i), row)
}

// confirm is called when a row comes behind the last one: then drafts there were right.
func (k *kept) confirm() {
	for i := len(k.flags) - 1; i >= 0 && k.flags[i]&rowDraft != 0; i-- {
		k.flags[i] = 0
	}
}

// truncate drops the rows at positions >= n.
func (k *kept) truncate(n int) {
	if n < len(k.tokens) {
		k.tokens, k.flags = k.tokens[:n], k.flags[:n]
	}
}

// bytes is the memory of the pages.
func (k *kept) bytes() int64 { return int64(len(k.pages)) * int64(k.pageRows()) * int64(k.width) * 4 }

// inbox is the rows of a session that wait to be computed. Positions are [from, from+len).
type inbox struct {
	width  int
	from   int
	head   int // index of the first one
	tokens []int32
	flags  []uint8
	rows   []float32
}

func (b *inbox) len() int { return len(b.tokens) - b.head }

func (b *inbox) end() int { return b.from + b.len() }

// add returns the memory of the next row, to be filled.
func (b *inbox) add(token int32, flags uint8) []float32 {
	if b.head > 0 && b.head >= b.len() {
		b.compact()
	}
	b.tokens, b.flags = append(b.tokens, token), append(b.flags, flags)
	n := len(b.tokens) * b.width
	if n > cap(b.rows) {
		grown := make([]float32, len(b.rows), max(n, 2*cap(b.rows)))
		copy(grown, b.rows)
		b.rows = grown
	}
	b.rows = b.rows[:n]
	return b.rows[n-b.width:]
}

func (b *inbox) compact() {
	b.rows = b.rows[:copy(b.rows, b.rows[b.head*b.width:])]
	b.tokens = b.tokens[:copy(b.tokens, b.tokens[b.head:])]
	b.flags = b.flags[:copy(b.flags, b.flags[b.head:])]
	b.head = 0
}

// take drops the first n rows, which were read.
func (b *inbox) take(n int) {
	b.head += n
	b.from += n
}

// truncate drops the rows at positions >= pos, which is at most end, and has what follows begin
// there. It returns how many were dropped.
func (b *inbox) truncate(pos int) int {
	n := min(max(b.end()-pos, 0), b.len())
	left := len(b.tokens) - n
	b.tokens, b.flags, b.rows = b.tokens[:left], b.flags[:left], b.rows[:left*b.width]
	if b.len() == 0 {
		b.from = pos
	}
	return n
}

// group returns how many of the first rows, at most most, may be computed without parting a
// draft from the row before it; 0 if the first group is longer.
func group(flags []uint8, most int) int {
	n := min(most, len(flags))
	for n > 0 && n < len(flags) && flags[n]&rowDraft != 0 {
		n--
	}
	return n
}
