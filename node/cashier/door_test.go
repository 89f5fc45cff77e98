package cashier

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/libp2p/go-libp2p/core/peer"

	"kvasird/p2p"
	"kvasird/settle"
)

func TestDoorRefuses(t *testing.T) {
	move := encodeCall(Move{settle.Hash{1}, 5})
	claim := uint8(opClaim)
	reserved := frameOf(claim, 0, 0, move)
	reserved[6] = 1
	long := frameOf(claim, 0, 0, nil)
	copy(long, []byte{1, 0, 0x10, 0}) // 1 MiB and a byte, none of which comes
	tests := []struct {
		name string
		sent []byte
		want string
	}{
		{"no such call", frameOf(0, 0, 0, move), "no call 0"},
		{"a later call", frameOf(uint8(opComplain)+1, 0, 0, move), "is one side older"},
		{"an answer", frameOf(frameDone, 0, 0, move), "no call 128"},
		{"flags", frameOf(claim, 1, 0, move), "flags 0x1"},
		{"an id", frameOf(claim, 0, 9, move), "id 9"},
		{"reserved field", reserved, "reserved"},
		{"a long frame", long, "1048577 bytes"},
		{"a long call", frameOf(claim, 0, 0, make([]byte, maxCall+1)), "call 11 of 65537 bytes"},
		{"empty", frameOf(claim, 0, 0, nil), "cannot be read"},
		{"no CBOR", frameOf(claim, 0, 0, []byte("{}")), "cannot be read"},
		{"more behind", frameOf(claim, 0, 0, append(bytes.Clone(move), 0)), "cannot be read"},
		{"unknown key", frameOf(claim, 0, 0, encodeCall(map[string]any{"id": settle.Hash{1}, "amount": 1, "to": 1})), "cannot be read"},
		{"a key is missing", frameOf(claim, 0, 0, encodeCall(map[string]any{"id": settle.Hash{1}})), "cannot be read"},
		{"short id", frameOf(claim, 0, 0, encodeCall(map[string]any{"id": []byte{1}, "amount": 1})), "cannot be read"},
		{"negative amount", frameOf(claim, 0, 0, encodeCall(map[string]any{"id": settle.Hash{1}, "amount": -1})), "cannot be read"},
		{"amount as text", frameOf(claim, 0, 0, encodeCall(map[string]any{"id": settle.Hash{1}, "amount": "1e3"})), "cannot be read"},
		{"a float", frameOf(claim, 0, 0, encodeCall(map[string]any{"id": settle.Hash{1}, "amount": 1.5})), "cannot be read"},
		{"many statements", frameOf(uint8(opEnd), 0, 0, encodeCall(Ended{Statements: make([][]byte, maxElements+1)})), "cannot be read"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []any
			d := newDoorTo(t, &echo{got: &got}, 0)
			c := d.open()
			defer c.Close()
			go c.Write(tt.sent)
			f, err := p2p.NewFrameReader(c, maxDone).Next()
			if err != nil {
				t.Fatal(err)
			}
			var r *Refusal
			if err := readAnswer(f, &Payout{}); !errors.As(err, &r) || r.Code != CodeBad || !strings.Contains(r.Text, tt.want) {
				t.Errorf("%v, want a refusal with %q", err, tt.want)
			}
			c.Close()
			d.serving.Wait()
			if len(got) > 0 || len(d.breaches) != 1 {
				t.Errorf("taken %v, breaches %v", got, d.breaches)
			}
		})
	}
}

func TestDoorRefusesKeylessPeer(t *testing.T) {
	d := newDoorTo(t, &echo{}, 0)
	d.id = must[peer.ID](t)(peer.Decode("QmaCpDMGvV2BGHeYERUEnRQAwe3N8SzbUtfsmvsqQLuvuJ"))
	var r *Refusal
	if _, err := d.remote.Terms(t.Context()); !errors.As(err, &r) || r.Code != CodeRights {
		t.Errorf("%v", err)
	}
}

// A caller that says nothing, or half of something, is let go of.
func TestDoorReadsSoLong(t *testing.T) {
	for name, sent := range map[string][]byte{"nothing": nil, "half a header": {1, 2, 3}, "half a call": frameOf(uint8(opClaim), 0, 0, make([]byte, 100))[:50]} {
		synctest.Test(t, func(t *testing.T) {
			d := newDoorTo(t, &echo{}, 0)
			c := d.open()
			began := time.Now()
			go c.Write(sent)
			if _, err := io.ReadAll(c); err != nil || time.Since(began) != readTime {
				t.Errorf("%s: %v after %v", name, err, time.Since(began))
			}
			if d.taken != [stages]int{} || len(d.breaches) > 0 {
				t.Errorf("%s: %v are taken, breaches %v", name, d.taken, d.breaches)
			}
		})
	}
}

// Callers get their turns by their number, and are forgotten after a while.
func TestDoorLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoorTo(t, &echo{}, 0)
		count := func() (ok, busy int) {
			for range callBurst + 50 {
				err := d.enter(d.id, reads)
				var r *Refusal
				switch {
				case err == nil:
					ok++
					d.leave(d.id, reads)
				case errors.As(err, &r) && r.Code == CodeBusy && r.Retry > 0:
					busy++
				default:
					t.Fatal(err)
				}
			}
			return ok, busy
		}
		if ok, busy := count(); ok != callBurst || busy != 50 {
			t.Errorf("%d at once, %d refused", ok, busy)
		}
		time.Sleep(time.Second)
		if ok, _ := count(); ok != callRate {
			t.Errorf("%d after a second", ok)
		}
		for range maxCallers - 1 {
			if err := d.enter(testPeer(t), reads); err != nil {
				break // all that may be read
			}
		}
		if d.taken[reads] != places[reads].all {
			t.Errorf("%d are read, at most %d", d.taken[reads], places[reads].all)
		}
		for id, c := range d.callers {
			for c.taken[reads] > 0 {
				d.leave(id, reads)
			}
		}
		for len(d.callers) < maxCallers {
			d.callers[testPeer(t)] = &caller{calls: callBurst, filled: time.Now()}
		}
		time.Sleep(callBurst * time.Second)
		if err := d.enter(testPeer(t), reads); err != nil || len(d.callers) != 1 {
			t.Errorf("%v, %d callers are kept", err, len(d.callers))
		}
	})
}

// A peer has a share of what is free at each stage, and nothing where nothing is.
func TestDoorShares(t *testing.T) {
	for at := range stages {
		d := newDoorTo(t, &echo{}, 0)
		fill := func(id peer.ID) (n int) {
			for {
				err := d.enter(id, at)
				if err != nil {
					if !strings.Contains(err.Error(), "run already") && !strings.Contains(err.Error(), "settlement is busy") {
						t.Fatal(err)
					}
					return n
				}
				n++
			}
		}
		first, most := fill(d.id), places[at]
		if first < most.each/2 || first > most.each {
			t.Errorf("stage %d: one peer takes %d of %d", at, first, most.each)
		}
		peers, last := 1, first
		for ; d.taken[at] < most.all; peers++ {
			if n := fill(testPeer(t)); n > last || n == 0 {
				t.Fatalf("stage %d: peer %d takes %d, the one before %d", at, peers, n, last)
			} else {
				last = n
			}
		}
		if peers < 16 || fill(testPeer(t)) > 0 || d.taken[at] != most.all {
			t.Errorf("stage %d: %d peers take %d, at most %d", at, peers, d.taken[at], most.all)
		}
	}
}

// crowd opens so many streams of each of so many peers; the end of the test closes them.
func (d *doorTo) crowd(t *testing.T, peers, streams int, sent []byte) {
	t.Helper()
	for range peers {
		id := testPeer(t)
		for range streams {
			here, there := net.Pipe()
			t.Cleanup(func() { here.Close() })
			d.serving.Go(func() { d.Serve(id, there) })
			go here.Write(sent)
		}
	}
}

// Neither who says nothing, nor whose calls take long, nor who waits for the chain keeps
// others from being answered.
func TestDoorCrowded(t *testing.T) {
	for name, tt := range map[string]struct {
		peers, streams int
		sent           []byte
	}{
		"silent":                 {8, 64, nil},
		"half a call":            {8, 64, frameOf(uint8(opClaim), 0, 0, make([]byte, 100))[:50]},
		"long calls":             {8, 64, frameOf(uint8(opLedger), 0, 0, encodeCall(keyOf("owner")))},
		"waiting for the chain":  {64, 64, frameOf(uint8(opPayX402), 0, 0, encodeCall(Partial{ID: settle.QuoteID{1}, Transaction: []byte{1}}))},
		"waiting for a transfer": {64, 64, frameOf(uint8(opDeposit), 0, 0, encodeCall(Deposit{Owner: keyOf("owner"), Amount: 1}))},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &echo{wait: make(chan struct{})}
				d := newDoorTo(t, e, 0)
				d.crowd(t, tt.peers, tt.streams, tt.sent)
				synctest.Wait()
				if d.taken == [stages]int{} {
					t.Fatal("nothing is taken")
				}
				free := newDoorTo(t, &echo{}, 0)
				d.cfg.As = free.cfg.As
				if _, err := d.remote.Terms(t.Context()); err != nil {
					t.Errorf("%v, with %v taken", err, d.taken)
				}
				close(e.wait)
			})
		})
	}
}

// A door that closes ends what runs once its time is over, and takes nothing new.
func TestDoorCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoorTo(t, &echo{wait: make(chan struct{})}, 0)
		ended := make(chan error)
		go func() {
			_, err := d.remote.Terms(t.Context())
			ended <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		go d.Close(ctx)
		var r *Refusal
		if err := <-ended; !errors.As(err, &r) || r.Code != CodeNotYet {
			t.Errorf("the running one: %v", err)
		}
		d.Close(ctx)
		if _, err := d.remote.Terms(t.Context()); !errors.As(err, &r) || r.Code != CodeBusy {
			t.Errorf("a new one: %v", err)
		}
	})
}
