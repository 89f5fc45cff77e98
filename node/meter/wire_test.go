package meter

import (
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
)

func TestAskLiteralBytes(t *testing.T) {
	q := about(testRequest, lines(2, 1, 300, 70000))
	want := "a5" + "0103" + "025820" + "01" + strings.Repeat("00", 31) + "0350" + "02" + strings.Repeat("00", 15) + "0465" + hex.EncodeToString([]byte("model")) +
		"0582" + "a201020201" + "a20119012c021a00011170"
	got := encodeAsk(q)
	if hex.EncodeToString(got) != want {
		t.Errorf("got  %x\nwant %s", got, want)
	}
	if back, err := decodeAsk(got); err != nil || !reflect.DeepEqual(back, q) {
		t.Errorf("%+v, %v", back, err)
	}
}
