package market

import (
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
	"time"
)

func serviceSample() *Announcement {
	return &Announcement{Models: []ModelNews{{ID: modelA, Shape: dense,
		Service: Service{Slots: 4, Free: 1, Context: 2048, Token: 2 * time.Millisecond}}}}
}

func TestServiceBytes(t *testing.T) {
	want := "a2" + "0101" + "0481" + "a3" + "0158200a" + strings.Repeat("00", 31) + "0383080080" + "0a840401190800" + "1907d0"
	got := encode(t, serviceSample())
	if hex.EncodeToString(got) != want {
		t.Errorf("got %x\nwant %s", got, want)
	}
	back, err := Decode(got)
	if err != nil || !reflect.DeepEqual(back, serviceSample()) {
		t.Errorf("read back %+v, %v", back, err)
	}
	none, _ := hex.DecodeString(strings.Replace(want, "0a840401190800"+"1907d0", "0a8400000000", 1))
	_, err = Decode(none)
	checkReason(t, "a service that is none", err, Malformed)
}

func TestRefusedService(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Service)
	}{
		{"no slots", func(s *Service) { s.Slots, s.Free = 0, 0 }},
		{"negative slots", func(s *Service) { s.Slots, s.Free = -1, -1 }},
		{"slots of a planet", func(s *Service) { s.Slots = MaxSlots + 1 }},
		{"more free than there are", func(s *Service) { s.Free = 5 }},
		{"less than none free", func(s *Service) { s.Free = -1 }},
		{"no context", func(s *Service) { s.Context = 0 }},
		{"context of a library", func(s *Service) { s.Context = maxWindow + 1 }},
		{"token before its time", func(s *Service) { s.Token = -time.Second }},
		{"token of two minutes", func(s *Service) { s.Token = 2 * time.Minute }},
	} {
		a := serviceSample()
		tt.change(&a.Models[0].Service)
		checkReason(t, tt.name+", encoded", a.check(), BadService)
		checkReason(t, tt.name+", decoded", decodeUnchecked(t, a), BadService)
	}
}
