package engine

import "slices"

// queued is a request that waits.
type queued interface {
	comparable
	by() string // its owner
}

// queue holds waiting requests: first come first served for each owner, and the
// owners take turns. So who waits for one answer is served after at most one of
// every other owner, however many those wait for.
type queue[R queued] struct {
	lines []*line[R] // in the order of their turns, none empty
	n     int        // requests
}

// line is what one owner waits for.
type line[R queued] struct {
	owner string
	list  []R
}

// of counts what an owner waits for.
func (q *queue[R]) of(owner string) int {
	for _, l := range q.lines {
		if l.owner == owner {
			return len(l.list)
		}
	}
	return 0
}

func (q *queue[R]) push(r R) {
	q.n++
	for _, l := range q.lines {
		if l.owner == r.by() {
			l.list = append(l.list, r)
			return
		}
	}
	q.lines = append(q.lines, &line[R]{r.by(), []R{r}})
}

// first is whose turn it is, or nil.
func (q *queue[R]) first() (r R) {
	if q.n > 0 {
		r = q.lines[0].list[0]
	}
	return r
}

// pop takes and returns whose turn it is, or nil.
func (q *queue[R]) pop() (r R) {
	if q.n == 0 {
		return r
	}
	q.n--
	l := q.lines[0]
	r = l.list[0]
	l.list = l.list[1:]
	q.lines = q.lines[1:]
	if len(l.list) > 0 {
		q.lines = append(q.lines, l)
	}
	return r
}

// drop removes those of which gone is true.
func (q *queue[R]) drop(gone func(R) bool) {
	q.n = 0
	for _, l := range q.lines {
		l.list = slices.DeleteFunc(l.list, gone)
		q.n += len(l.list)
	}
	q.lines = slices.DeleteFunc(q.lines, func(l *line[R]) bool { return len(l.list) == 0 })
}
