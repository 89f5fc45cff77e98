package engine

import "slices"

// queue holds waiting requests: first come first served for each owner, and the
// owners take turns. So who waits for one answer is served after at most one of
// every other owner, however many those wait for.
type queue struct {
	lines []*line // in the order of their turns, none empty
	n     int     // requests
}

// line is what one owner waits for.
type line struct {
	owner string
	list  []*Generation
}

// of counts what an owner waits for.
func (q *queue) of(owner string) int {
	for _, l := range q.lines {
		if l.owner == owner {
			return len(l.list)
		}
	}
	return 0
}

func (q *queue) push(g *Generation) {
	q.n++
	for _, l := range q.lines {
		if l.owner == g.owner {
			l.list = append(l.list, g)
			return
		}
	}
	q.lines = append(q.lines, &line{g.owner, []*Generation{g}})
}

// pop returns whose turn it is, or nil.
func (q *queue) pop() *Generation {
	if q.n == 0 {
		return nil
	}
	q.n--
	l := q.lines[0]
	g := l.list[0]
	l.list = l.list[1:]
	q.lines = q.lines[1:]
	if len(l.list) > 0 {
		q.lines = append(q.lines, l)
	}
	return g
}

// drop removes those of which gone is true.
func (q *queue) drop(gone func(*Generation) bool) {
	q.n = 0
	for _, l := range q.lines {
		l.list = slices.DeleteFunc(l.list, gone)
		q.n += len(l.list)
	}
	q.lines = slices.DeleteFunc(q.lines, func(l *line) bool { return len(l.list) == 0 })
}
