package market

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// machineSample uses every field of machines.
func machineSample() *Announcement {
	return &Announcement{
		Capacity: Capacity{FreeMemory: 4096},
		Machine: &Machine{VRAM: 256, Cores: 8, Bytes: 5000, Batch: 6000, Layer: 300 * time.Nanosecond,
			Up: 30, Down: 40, Call: 70 * time.Microsecond},
		Models: []ModelNews{{ID: modelA, Shape: dense, Dense: true, Memory: 4000}},
	}
}

func TestMachineBytes(t *testing.T) {
	want := "a4" + "0101" + "0383000019" + "1000" + "0481" + "a4" + "0158200a" + strings.Repeat("00", 31) + "0383080080" + "0404" + "09190fa0" +
		"0688" + "190100" + "08" + "191388" + "191770" + "19012c" + "181e" + "1828" + "1a00011170"
	got := encode(t, machineSample())
	if hex.EncodeToString(got) != want {
		t.Errorf("got %x\nwant %s", got, want)
	}
	back, err := Decode(got)
	if err != nil || !reflect.DeepEqual(back, machineSample()) {
		t.Errorf("read back %+v, %v", back, err)
	}
	// a machine of which nothing is known is told all the same
	back, err = Decode(encode(t, &Announcement{Machine: &Machine{}}))
	if err != nil || back.Machine == nil || *back.Machine != (Machine{}) {
		t.Errorf("an unknown machine is read as %+v, %v", back, err)
	}
}

func TestRefusedMachines(t *testing.T) {
	machine := func(f func(*Machine)) func(*Announcement) { return func(a *Announcement) { f(a.Machine) } }
	for _, tt := range []struct {
		name   string
		change func(*Announcement)
		want   Reason
	}{
		{"GPU of a planet", machine(func(m *Machine) { m.VRAM = MaxHint + 1 }), BadMachine},
		{"negative cores", machine(func(m *Machine) { m.Cores = -1 }), BadMachine},
		{"cores of a planet", machine(func(m *Machine) { m.Cores = maxCores + 1 }), BadMachine},
		{"first row at the speed of thought", machine(func(m *Machine) { m.Bytes = MaxHint + 1 }), BadMachine},
		{"further rows likewise", machine(func(m *Machine) { m.Batch = MaxHint + 1 }), BadMachine},
		{"layer before its time", machine(func(m *Machine) { m.Layer = -1 }), BadMachine},
		{"layer of two seconds", machine(func(m *Machine) { m.Layer = 2 * time.Second }), BadMachine},
		{"upload of a planet", machine(func(m *Machine) { m.Up = MaxHint + 1 }), BadMachine},
		{"download of a planet", machine(func(m *Machine) { m.Down = MaxHint + 1 }), BadMachine},
		{"call before its time", machine(func(m *Machine) { m.Call = -1 }), BadMachine},
		{"call of two minutes", machine(func(m *Machine) { m.Call = 2 * time.Minute }), BadMachine},
		{"model in the memory of a planet", func(a *Announcement) { a.Models[0].Memory = MaxHint + 1 }, BadHint},
		{"away with a machine", func(a *Announcement) { a.Away, a.Capacity, a.Models = true, Capacity{}, nil }, AwayHolds},
	} {
		a := machineSample()
		tt.change(a)
		checkReason(t, tt.name+", encoded", a.check(), tt.want)
		m := a.Machine
		w := wireAnnouncement{Version: wireVersion, Away: a.Away, Machine: &wireMachine{VRAM: m.VRAM, Cores: m.Cores, Bytes: m.Bytes,
			Batch: m.Batch, Layer: int64(m.Layer), Up: m.Up, Down: m.Down, Call: int64(m.Call)}}
		for i := range a.Models {
			w.Models = append(w.Models, a.Models[i].wire())
		}
		b, err := encMode.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Decode(b)
		checkReason(t, tt.name+", decoded", err, tt.want)
	}
}

func TestRefusedMachineBytes(t *testing.T) {
	good := encode(t, machineSample())
	for _, tt := range []struct{ name, old, new string }{
		{"machine of seven", "068819010008", "0687190100"},
		{"machine of nine", "068819010008", "06891901000800"},
		{"machine that is a map", "0688", "06a4"},
		{"no machine, told", hex.EncodeToString(good[bytes.Index(good, []byte{0x06, 0x88}):]), "06f6"},
		{"negative size", "0688190100", "0688390100"},
		{"rate that is a float", "191388", "f91388"},
		{"time beyond 63 bits", "1a00011170", "1bffffffffffffffff"},
		{"cores beyond 63 bits", "0688190100" + "08", "0688190100" + "1bffffffffffffffff"},
		{"no memory, told", "09190fa0", "0900"},
		{"negative memory", "09190fa0", "09390fa0"},
	} {
		o, _ := hex.DecodeString(tt.old)
		n, _ := hex.DecodeString(tt.new)
		if bytes.Count(good, o) != 1 {
			t.Fatalf("%s: %s is %d times in the sample", tt.name, tt.old, bytes.Count(good, o))
		}
		_, err := Decode(bytes.Replace(good, o, n, 1))
		checkReason(t, tt.name, err, Malformed)
	}
}

// TestAuthors: those who are away, lost, or whose record has run out are no authors.
func TestAuthors(t *testing.T) {
	x := newTable(t, Policy{}, modelA, dense)
	update := func(from string, seq uint64, a *Announcement, validity time.Duration) {
		t.Helper()
		if _, err := x.Update(Record{from, seq, t0, validity, encode(t, a)}, t0); err != nil {
			t.Fatal(err)
		}
	}
	for _, from := range []string{"lost", "c", "away", "a"} {
		update(from, 1, machineSample(), time.Hour)
	}
	update("old", 1, machineSample(), time.Minute)
	update("away", 2, &Announcement{Away: true}, time.Hour)
	update("b", 1, &Announcement{}, time.Hour)
	x.Lost("lost", t0)
	var got []string
	for _, a := range x.Authors(t0.Add(2 * time.Minute)) {
		got = append(got, a.Peer)
		if (a.News.Machine == nil) != (a.Peer == "b") {
			t.Errorf("%s tells of %+v", a.Peer, a.News.Machine)
		}
	}
	if want := []string{"a", "b", "c"}; !slices.Equal(got, want) {
		t.Errorf("authors %q, want %q", got, want)
	}
	// what else is told does not count anew
	before := x.Version(t0)
	again := machineSample()
	again.Machine.VRAM, again.Models[0].Memory = 1, 2
	update("a", 2, again, time.Hour)
	if x.Version(t0) != before {
		t.Error("a machine is counted")
	}
}
