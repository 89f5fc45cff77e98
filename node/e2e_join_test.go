//go:build cgo && linux

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvasird/node/api"
)

// joinTime bounds a test of joining and leaving, on a machine as busy as this.
const joinTime = 4 * time.Minute

// newJoining is a network whose first node, with the model, has begun to run.
func newJoining(t *testing.T, opts NewNetwork, args ...string) (n *network, at string) {
	t.Helper()
	n = newNetwork(t, opts)
	return n, n.begin(args...)
}

// begin starts the node that has the whole model.
func (n *network) begin(args ...string) (at string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), joinTime)
	n.t.Cleanup(cancel)
	n.ctx = ctx
	n.backbone = n.join("backbone", append([]string{"--model", n.whole, "--wait", "60"}, args...)...)
	st := n.sees(n.backbone, func(*api.Status) bool { return true })
	n.http = st.HTTP
	return localAddr(st)
}

// sees waits until the status of a node is good.
func (n *network) sees(c *child, good func(*api.Status) bool) *api.Status {
	n.t.Helper()
	st, err := c.await(n.ctx, good)
	if err != nil {
		n.t.Fatal(err)
	}
	return st
}

// servesParts reports whether a volunteer has something, all of which it serves.
func servesParts(st *api.Status) bool {
	if st.Volunteer == nil || len(st.Volunteer.Parts) == 0 {
		return false
	}
	for _, p := range st.Volunteer.Parts {
		if p.State != api.PartServing {
			return false
		}
	}
	return true
}

// about returns what a node's status says of a peer.
func about(st *api.Status, id string) api.Peer {
	for _, p := range st.Peers {
		if p.ID == id {
			return p
		}
	}
	return api.Peer{}
}

func rowsOf(st *api.Status) (rows uint64) {
	for _, r := range st.Rows {
		rows += r.Rows
	}
	return rows
}

// said is everything a daemon wrote that is still known.
func (c *child) said() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.words.String()
}

// says waits until a daemon has written these words.
func (n *network) says(c *child, words ...string) {
	n.t.Helper()
	for {
		err := says(c.said(), words...)
		if err == nil {
			return
		}
		select {
		case <-n.ctx.Done():
			n.t.Fatalf("%s: %v", c.name, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// TestInvitation: who has a ticket helps, who has one that names it has its own
// work done, and who has lost it is out.
func TestInvitation(t *testing.T) {
	t.Parallel()
	n, at := newJoining(t, NewNetwork{Replicas: 1, Admission: "invitation"}, "--experts", "remote")
	authority := n.file
	invite := func() string {
		var ticket bytes.Buffer
		if err := Invite(NewTicket{File: authority}, &ticket, io.Discard); err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(ticket.String())
	}
	// the friends have the file without the key that lies beside it
	text, err := os.ReadFile(authority)
	if err != nil {
		t.Fatal(err)
	}
	n.file = n.write("friends.toml", text)

	helper := n.join("helper", "--peer", at, "--ticket", invite())
	stranger := n.join("stranger", "--peer", at)
	n.sees(n.backbone, serving)
	n.sameAsAlone(questions[0], nil)
	st := n.sees(helper, func(st *api.Status) bool { return rowsOf(st) > 0 })
	helperID, helperAt, helped := st.PeerID, localAddr(st), rowsOf(st)
	me := n.sees(n.backbone, serving).PeerID
	refused := n.sees(stranger, func(st *api.Status) bool { return about(st, me).State == api.PeerRefused })
	if err := says(about(refused, me).Reason, "invitation is missing", "ask for a ticket for "+refused.PeerID, "--ticket"); err != nil {
		t.Errorf("the stranger's status: %v", err)
	}
	n.says(stranger, "by invitation and there is no ticket", refused.PeerID)

	ticket := invite()
	guest := n.join("guest", "--peer", at, "--peer", helperAt, "--ticket", ticket, "--model", n.whole, "--experts", "remote")
	st = n.sees(guest, func(st *api.Status) bool {
		return strings.Contains(about(st, helperID).Reason, "kvasir network invite --for "+st.PeerID+" --infer")
	})
	if len(about(st, helperID).Rows) > 0 || st.State == api.StateServing {
		t.Errorf("the guest is %s and had %v computed", st.State, about(st, helperID).Rows)
	}
	if now := rowsOf(n.sees(helper, serving)); now != helped {
		t.Errorf("the helper computed %d rows for the guest", now-helped)
	}

	if err := RevokeMember(n.ctx, Revocation{File: authority, What: ticket, Data: n.backbone.dir}, io.Discard); err != nil {
		t.Fatal(err)
	}
	n.sees(guest, func(st *api.Status) bool {
		for _, id := range []string{me, helperID} {
			if p := about(st, id); p.State != api.PeerRefused || !strings.Contains(p.Reason, "revoked") {
				return false
			}
		}
		return true
	})
	for _, c := range []*child{n.backbone, helper} {
		n.sees(c, func(now *api.Status) bool { return about(now, st.PeerID).State != api.PeerConnected })
	}
	n.sameAsAlone(questions[1], nil)
}

// diskOf is what a folder takes on disk.
func diskOf(t *testing.T, dir string) (bytes int64) {
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Mode().IsRegular() {
			bytes += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // files come and go
		t.Error(err)
	}
	return bytes
}

// meanwhile has look called all the time until the returned function is.
func meanwhile(look func()) (end func()) {
	stop := make(chan struct{})
	var loop sync.WaitGroup
	loop.Go(func() {
		for {
			look()
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	return sync.OnceFunc(func() { close(stop); loop.Wait() })
}

// held is how many bytes a node has verified of its models.
func (n *network) held(c *child) (held int64) {
	n.t.Helper()
	err := c.client().Model(n.ctx, api.ModelRequest{Action: api.ModelList}, func(ev api.ModelEvent) error {
		for _, m := range ev.Models {
			held += m.Held
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return held
}

// TestKilledDownload: a volunteer that is killed while it downloads goes on where
// it was, and is within its budget at any time.
func TestKilledDownload(t *testing.T) {
	t.Parallel()
	const limit, rate = 22_000_000, 700_000 // bytes, bytes per second
	n, at := newJoining(t, NewNetwork{Replicas: 1})
	budget := []string{"--peer", at, "--disk", fmt.Sprint(limit)}
	v := n.join("v", append(budget, "--download", fmt.Sprint(rate))...)
	dir, most := filepath.Join(v.dir, storeName), int64(0)
	end := meanwhile(func() { most = max(most, diskOf(t, dir)) })
	defer end()
	n.sees(v, func(st *api.Status) bool { return st.Volunteer != nil && len(st.Volunteer.Downloads) > 0 })
	before := n.held(v)
	for before < 2<<20 { // 1 MiB of it is the header
		time.Sleep(50 * time.Millisecond)
		before = n.held(v)
	}
	// A group is durable a second after it came.
	time.Sleep(3 * time.Second)
	st := n.sees(v, func(*api.Status) bool { return true })
	v.cmd.Process.Kill()
	<-v.exited
	if len(st.Volunteer.Downloads) == 0 || servesParts(st) {
		t.Errorf("the kill came too late: %+v", st.Volunteer)
	}

	v = n.join("v", budget...)
	n.sees(v, func(*api.Status) bool { return true })
	after := n.held(v)
	if after < before {
		t.Errorf("%d bytes were verified before the kill, %d are after it", before, after)
	}
	st = n.sees(v, servesParts)
	end()
	t.Logf("%d bytes held, killed, %d held, %d when it serves; at most %d of %d on disk", before, after, n.held(v), most, limit)
	if d := st.Volunteer.Disk; most > limit || d.Used > d.Limit || d.Limit != limit {
		t.Errorf("%d bytes on disk, the status says %+v; the limit is %d", most, d, limit)
	}
}

// mostReplicas is the most replicas that a node counts of any expert, and how many
// peers it takes for holders of some.
func (n *network) mostReplicas(c *child) (replicas, holders int) {
	n.t.Helper()
	maps, err := c.client().Coverage(n.ctx)
	if err != nil {
		n.t.Error(err)
	}
	for _, m := range maps {
		for _, l := range m.Layers {
			for _, r := range l.Replicas {
				replicas = max(replicas, r)
			}
		}
		for _, h := range m.Holders {
			if len(h.Serving)+len(h.Claimed) > 0 {
				holders++
			}
		}
	}
	return replicas, holders
}

// TestQuickRestarts: however often one identity comes and goes, it is one.
func TestQuickRestarts(t *testing.T) {
	t.Parallel()
	n, at := newJoining(t, NewNetwork{Replicas: 1})
	var most, holders int
	end := meanwhile(func() {
		r, h := n.mostReplicas(n.backbone)
		most, holders = max(most, r), max(holders, h)
	})
	defer end()
	start := func() *child { return n.join("v", "--peer", at) }
	v := start()
	id := n.sees(v, servesParts).PeerID
	n.covered(n.backbone, 1)
	for range 6 {
		v.cmd.Process.Kill()
		<-v.exited
		v = start()
		// it is killed again as soon as it has met somebody
		st := n.sees(v, func(st *api.Status) bool { return st.Reach != nil && st.Reach.DirectPeers > 0 })
		if st.PeerID != id {
			t.Fatalf("it was %s and is %s", id, st.PeerID)
		}
	}
	n.sees(v, servesParts)
	n.covered(n.backbone, 1)
	end()
	if most > 1 || holders > 1 { // that it is counted at all, covered has seen
		t.Errorf("one volunteer was counted as %d replicas and %d holders", most, holders)
	}
	n.sameAsAlone(questions[0], nil)
}

// TestPause: a volunteer that pauses, or ends, first has others go elsewhere.
func TestPause(t *testing.T) {
	t.Parallel()
	n, at := newJoining(t, NewNetwork{Replicas: 2}, "--experts", "remote")
	v, other := n.join("v1", "--peer", at), n.join("v2", "--peer", at)
	id := n.sees(v, servesParts).PeerID
	n.covered(n.backbone, 2)
	n.sees(n.backbone, serving)
	leaving := func() bool {
		maps, err := n.backbone.client().Coverage(n.ctx)
		if err != nil || len(maps) != 1 {
			t.Fatal(maps, err)
		}
		for _, h := range maps[0].Holders {
			if h.Peer == id {
				return h.Leaving
			}
		}
		return false
	}
	pause := func(paused bool) {
		if got, err := v.client().Pause(n.ctx, paused); err != nil || got.Paused != paused || got.Note != "" {
			t.Errorf("pause %v: %+v, %v", paused, got, err)
		}
	}
	n.sameAsAlone(questions[0], func(token int) {
		if token == 5 {
			pause(true)
		}
	})
	for !leaving() {
		if n.ctx.Err() != nil {
			t.Fatal("the coverage does not show that it leaves")
		}
		time.Sleep(50 * time.Millisecond)
	}
	before := n.sees(v, func(st *api.Status) bool { return st.Volunteer.Paused })
	n.sameAsAlone(questions[1], nil)
	n.sameAsAlone(questions[2], nil)
	if rows := rowsOf(n.sees(v, serving)) - rowsOf(before); rows != 0 {
		t.Errorf("it computed %d rows while it was paused", rows)
	}

	pause(false)
	n.covered(n.backbone, 2)
	if leaving() {
		t.Error("after the pause it still leaves")
	}
	// now it alone is left, so it has to do the work
	n.sameAsAlone(questions[3], func(token int) {
		if token == 5 {
			other.cmd.Process.Signal(syscall.SIGTERM)
		}
	})
	select {
	case <-other.exited:
	case <-n.ctx.Done():
		t.Fatal("the other does not end")
	}
	if other.err != nil {
		t.Errorf("%v\n%s", other.err, other.lastWords())
	}
	n.sameAsAlone(questions[0], nil)
	if rows := rowsOf(n.sees(v, serving)) - rowsOf(before); rows == 0 {
		t.Error("it computed nothing after the pause")
	}
}
