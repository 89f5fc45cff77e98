//go:build cgo && linux

package node

import (
	"fmt"
	"testing"
	"time"

	"kvasird/node/api"
)

// newRinged makes a network in which stages hold windows of the shipped model, which a
// node that runs all of it has brought.
func newRinged(t *testing.T, names ...string) (n *network, stages []*child) {
	t.Helper()
	n, at := newJoining(t, NewNetwork{Replicas: 1}, "--experts", "here")
	return n, n.ring(at, names, "--memory", "14MB", "--context", "1024")
}

// ring starts stages of the backbone's model.
func (n *network) ring(at string, names []string, args ...string) (stages []*child) {
	n.t.Helper()
	id := n.sees(n.backbone, serving).Model.ID
	for _, name := range names {
		stages = append(stages, n.join(name, append([]string{"--peer", at, "--model", id}, args...)...))
	}
	return stages
}

// TestRingFormsItself: three nodes that know a model's id alone, none of which can
// hold it, each take a window, and any of them answers.
func TestRingFormsItself(t *testing.T) {
	n, stages := newRinged(t, "s1", "s2", "s3")
	began := time.Now()
	for i, s := range stages {
		st := n.sees(s, func(st *api.Status) bool { return st.HTTP != "" })
		n.http = st.HTTP
		n.goesRound(s)
		n.sameSureAnswer(questions[i%len(questions)])
		t.Logf("%s answers %v after it was started", s.name, time.Since(began).Round(100*time.Millisecond))
	}
	n.answeredNothing()
}

// goesRound waits until a node's ring is ready.
func (n *network) goesRound(c *child) {
	n.t.Helper()
	n.says(c, "a canary token went round the ring")
}

// answeredNothing checks that the node that has all of the model was not asked in place of a ring.
func (n *network) answeredNothing() {
	n.t.Helper()
	if st := n.sees(n.backbone, serving); st.Carried.Answered+st.Carried.Gone > 0 || len(st.Carried.Refused) > 0 {
		n.t.Errorf("the node that has all of the model was asked: %+v", st.Carried)
	}
}

// isReady waits until every model is ready at a node.
func (n *network) isReady(c *child) {
	n.t.Helper()
	limit := time.Now().Add(time.Minute)
	for n.readyz() != nil {
		if time.Now().After(limit) {
			n.t.Fatalf("%v\n%s", n.readyz(), c.said())
		}
		time.Sleep(time.Second)
	}
}

// readyz asks whether every model is ready.
func (n *network) readyz() error {
	if status, body := n.get("/readyz"); status != 200 {
		return fmt.Errorf("%d %s", status, body)
	}
	return nil
}

// TestRingOfBackbones: stages that hold no experts have them computed by volunteers.
func TestRingOfBackbones(t *testing.T) {
	n, at := newJoining(t, NewNetwork{Replicas: 1}, "--experts", "here")
	id := n.sees(n.backbone, serving).Model.ID
	var stages []*child
	for _, name := range []string{"s1", "s2"} {
		stages = append(stages, n.join(name, "--peer", at, "--model", id, "--experts", "remote", "--memory", "5500KB", "--context", "1024", "--wait", "60"))
	}
	v := n.join("v", "--peer", at, "--memory", "64MB")
	for i, s := range stages {
		n.http = n.sees(s, func(st *api.Status) bool { return st.HTTP != "" }).HTTP
		n.goesRound(s)
		n.sameSureAnswer(questions[i])
		st := n.sees(s, func(*api.Status) bool { return true })
		if w := st.Volunteer.Windows; len(w) != 1 || w[0].Layers.End-w[0].Layers.Begin == 4 {
			t.Errorf("%s holds %+v, want a part of the layers", s.name, w)
		}
	}
	if st := n.sees(v, func(*api.Status) bool { return true }); rowsOf(st) == 0 {
		t.Error("the volunteer computed nothing")
	}
	n.answeredNothing()
}
