package carry

import (
	"bytes"
	"encoding/hex"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvasird/ggml/gguf"
	"kvasird/node/gateway"
	"kvasird/p2p"
)

var modelA = gguf.ModelID{10}

func sampleRequest() gateway.Request {
	return gateway.Request{
		Prompt: []int32{1, 2, 3}, MaxTokens: 64, Temperature: 0.5, TopK: 40, TopP: 1, MinP: 0.25, Seed: 7, RepeatPenalty: 1,
		FrequencyPenalty: -1, PresencePenalty: 2, LogitBias: map[int32]float32{5: -100},
	}
}

func sampleExtra() gateway.Extra {
	return gateway.Extra{Grammar: "g", Triggers: []string{"t"}, Special: true, Logprobs: true, Top: 2}
}

func encodeAsk(t testing.TB, r gateway.Request, x gateway.Extra) []byte {
	t.Helper()
	a := askOf(modelA, &r, &x)
	b, err := a.encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestLiteralBytes holds the wire to what was published.
func TestLiteralBytes(t *testing.T) {
	id := "0258200a" + strings.Repeat("00", 31)
	for _, tt := range []struct {
		name string
		got  []byte
		hex  string
	}{
		{"ask", encodeAsk(t, sampleRequest(), gateway.Extra{}), "ad" + "0101" + id + "0303" + "041840" + "05f93800" + "061828" + "07f93c00" + "08f93400" +
			"0907" + "0af93c00" + "0bf9bc00" + "0cf94000" + "0da105f9d640"},
		{"shortest ask", encodeAsk(t, gateway.Request{Prompt: []int32{9}}, gateway.Extra{}), "a3" + "0101" + id + "0301"},
		{"ask with wishes", encodeAsk(t, gateway.Request{Prompt: []int32{9}}, sampleExtra()),
			"a8" + "0102" + id + "0301" + "0e6167" + "0f816174" + "10f5" + "11f5" + "1202"},
		{"likely", putLikely(nil, sampleLikely()), "03000000" + "02010000" + "000000bf" + "01000000" + "01000000" + "000080bf"},
		{"lacking", putRefusal(nil, &refusal{code: CodeLacks, lacks: gateway.Abilities{Grammar: true, Logprobs: true}}), "07000000" + "00000000" + "05000000" + "00000000"},
		{"tokens", putAnswer(nil, 3, 258, 1), "03000000" + "02010000" + "01000000"},
		{"stop", putEnd("stop"), "01000000"},
		{"length", putEnd("length"), "02000000"},
		{"busy", putRefusal(nil, &refusal{code: CodeBusy, retry: 2 * time.Second, text: "x"}), "04000000" + "d0070000" + "00000000" + "00000000" + "78"},
		{"long", putRefusal(nil, &refusal{code: CodeLong, prompt: 9, limit: 8}), "05000000" + "00000000" + "09000000" + "08000000"},
	} {
		if got := hex.EncodeToString(tt.got); got != tt.hex {
			t.Errorf("%s:\n got %s\nwant %s", tt.name, got, tt.hex)
		}
	}
	a, err := decodeAsk(encodeAsk(t, sampleRequest(), sampleExtra()))
	if err != nil {
		t.Fatal(err)
	}
	back := a.request()
	back.Prompt = sampleRequest().Prompt
	if !reflect.DeepEqual(back, sampleRequest()) || a.Prompt != 3 {
		t.Errorf("read back %+v with %d tokens", back, a.Prompt)
	}
	if !reflect.DeepEqual(a.extra(), sampleExtra()) {
		t.Errorf("read back %+v", a.extra())
	}
}

func sampleLikely() *likely {
	return &likely{3, gateway.TokenProb{ID: 258, Logprob: -0.5}, []gateway.TokenProb{{ID: 1, Logprob: -1}}}
}

// TestRefusedAsks has one ask for every rule; encode and decode both apply it.
func TestRefusedAsks(t *testing.T) {
	bias := map[int32]float32{}
	for i := range int32(maxBias + 1) {
		bias[i] = 1
	}
	nan := float32(math.NaN())
	for _, tt := range []struct {
		name   string
		change func(*ask)
		want   string
	}{
		{"version", func(a *ask) { a.Version = 4 }, "version 4"},
		{"version 3 without inputs", func(a *ask) { a.Version = 3 }, "version 3 with what belongs to version 2"},
		{"wishes of version 1", func(a *ask) { a.Version = 1 }, "version 1 with what belongs to version 2"},
		{"version 2 without wishes", func(a *ask) { a.Grammar, a.Triggers, a.Special, a.Logprobs, a.Top = "", nil, false, false, 0 }, "version 2 with what belongs to version 1"},
		{"long grammar", func(a *ask) { a.Grammar = strings.Repeat("x", gateway.MaxGrammar+1) }, "want at most"},
		{"grammar that is no text", func(a *ask) { a.Grammar = "\xff" }, "UTF-8"},
		{"triggers without a grammar", func(a *ask) { a.Grammar = "" }, "none without a grammar"},
		{"many triggers", func(a *ask) { a.Triggers = make([]string, maxTriggers+1) }, ""},
		{"empty trigger", func(a *ask) { a.Triggers[0] = "" }, "trigger \"\""},
		{"long trigger", func(a *ask) { a.Triggers[0] = strings.Repeat("x", maxTrigger+1) }, "want 1 to 256"},
		{"many beside", func(a *ask) { a.Top = MaxTop + 1 }, "21 tokens beside"},
		{"fewer than none beside", func(a *ask) { a.Top = -1 }, "-1 tokens beside"},
		{"beside without log-probabilities", func(a *ask) { a.Logprobs = false }, "with log-probabilities only"},
		{"short model id", func(a *ask) { a.Model = a.Model[:31] }, "31 bytes"},
		{"no prompt", func(a *ask) { a.Prompt = 0 }, "prompt of 0"},
		{"negative prompt", func(a *ask) { a.Prompt = -1 }, "prompt of -1"},
		{"prompt of a library", func(a *ask) { a.Prompt = MaxPrompt + 1 }, "want 1 to"},
		{"negative answer", func(a *ask) { a.Most = -1 }, "answer of -1"},
		{"answer of a library", func(a *ask) { a.Most = math.MaxInt32 + 1 }, "nor above"},
		{"negative top_k", func(a *ask) { a.TopK = -1 }, "top_k -1"},
		{"temperature", func(a *ask) { a.Temperature = nan }, "temperature is NaN"},
		{"negative temperature", func(a *ask) { a.Temperature = -1 }, "temperature is -1"},
		{"top_p", func(a *ask) { a.TopP = float32(math.Inf(1)) }, "top_p is +Inf"},
		{"min_p", func(a *ask) { a.MinP = -1 }, "min_p is -1"},
		{"repeat penalty", func(a *ask) { a.RepeatPenalty = -1 }, "repeat penalty is -1"},
		{"frequency penalty", func(a *ask) { a.FrequencyPenalty = nan }, "frequency penalty is NaN"},
		{"presence penalty", func(a *ask) { a.PresencePenalty = nan }, "presence penalty is NaN"},
		{"bias of nothing", func(a *ask) { a.LogitBias = map[int32]float32{1: nan} }, "bias NaN"},
		{"bias of a negative token", func(a *ask) { a.LogitBias = map[int32]float32{-1: 1} }, "token -1"},
		{"many biases", func(a *ask) { a.LogitBias = bias }, ""},
		{"inputs of version 2", func(a *ask) { a.Inputs = []int{a.Prompt} }, "version 2 with what belongs to version 3"},
		{"inputs with settings", func(a *ask) { a.Version, a.Inputs = 3, []int{a.Prompt} }, "settings of an answer"},
		{"an empty input", func(a *ask) { embedAsk(a, 0, 3) }, "input 0 of 0"},
		{"a negative input", func(a *ask) { embedAsk(a, -1, 4) }, "input 0 of -1"},
		{"an input of a library", func(a *ask) { embedAsk(a, MaxInputTokens+1); a.Prompt = MaxInputTokens + 1 }, "want 1 to"},
		{"inputs of more than was told", func(a *ask) { embedAsk(a, 2, 2) }, "2 inputs of 4 tokens, 3 were told"},
		{"many inputs", func(a *ask) { embedAsk(a, slices.Repeat([]int{1}, MaxInputs+1)...); a.Prompt = MaxInputs + 1 }, ""},
		{"inputs of a library", func(a *ask) { embedAsk(a, MaxInputTokens, 1); a.Prompt = MaxInputTokens + 1 }, "at most"},
	} {
		r, x := sampleRequest(), sampleExtra()
		a := askOf(modelA, &r, &x)
		tt.change(&a)
		if _, err := a.encode(); err == nil || tt.name != "grammar that is no text" && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s, encoded: %v, want %q", tt.name, err, tt.want)
		}
		if _, err := decodeAsk(encodeControl(a)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s, decoded: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// embedAsk makes an ask for embeddings of one for a prompt of three tokens.
func embedAsk(a *ask, inputs ...int) {
	*a = ask{Version: embedVersion, Model: a.Model, Prompt: 3, Inputs: inputs}
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

// TestRefusedBytes has bytes that are no frame of the protocol.
func TestRefusedBytes(t *testing.T) {
	good := encodeAsk(t, sampleRequest(), gateway.Extra{})
	ask := func(b []byte) error { _, err := decodeAsk(b); return err }
	tokens := func(b []byte) error { _, err := decodeTokens(b, 100); return err }
	answer := func(b []byte) error { _, _, err := decodeAnswer(b, 100); return err }
	likelies := func(b []byte) error { _, err := decodeLikely(b, 300); return err }
	one := putLikely(nil, sampleLikely())
	edit := func(at int, with string) []byte { b := bytes.Clone(one); copy(b[at:], unhex(with)); return b }
	taken := func(b []byte) error { _, err := decodeTaken(b); return err }
	end := func(b []byte) error { _, err := decodeEnd(b); return err }
	refused := func(b []byte) error { _, err := decodeRefusal(b); return err }
	for _, tt := range []struct {
		name   string
		decode func([]byte) error
		b      []byte
	}{
		{"empty ask", ask, nil},
		{"ask cut short", ask, good[:len(good)-1]},
		{"ask with a trailing byte", ask, append(bytes.Clone(good), 0)},
		{"ask too large", ask, make([]byte, maxAsk+1)},
		{"ask with an unknown key", ask, append(unhex("ae"), append(bytes.Clone(good[1:]), 0x13, 1)...)},
		{"ask with a long float", ask, bytes.Replace(good, unhex("05f93800"), unhex("05fa3f000000"), 1)},
		{"ask that tells a zero", ask, bytes.Replace(good, unhex("05f93800"), unhex("05f90000"), 1)},
		{"ask that is a list", ask, unhex("8101")},
		{"no tokens", tokens, nil},
		{"half a token", tokens, make([]byte, 6)},
		{"negative token", tokens, unhex("ffffffff")},
		{"token beyond the vocabulary", tokens, unhex("64000000")},
		{"answer without tokens", answer, make([]byte, 4)},
		{"answer beyond the window", answer, make([]byte, 4+4*Window+4)},
		{"answer that cached a library", answer, unhex("00000001" + "00000000")},
		{"answer beyond the vocabulary", answer, unhex("00000000" + "64000000")},
		{"half a likely", likelies, one[:likelyHead-1]},
		{"likely cut short", likelies, one[:len(one)-1]},
		{"likely with a trailing byte", likelies, append(bytes.Clone(one), 0)},
		{"likely beside gigabytes", likelies, edit(12, "ffffffff")},
		{"likely beside too many", likelies, putLikely(nil, &likely{top: make([]gateway.TokenProb, MaxTop+1)})},
		{"likely that cached a library", likelies, edit(0, "00000001")},
		{"likely beyond the vocabulary", likelies, edit(4, "2c010000")},
		{"likely and negative", likelies, edit(4, "ffffffff")},
		{"more likely than sure", likelies, edit(8, "0000003f")},
		{"likely as nothing", likelies, edit(8, "0000c07f")},
		{"another beyond the vocabulary", likelies, edit(16, "2c010000")},
		{"another more likely than sure", likelies, edit(20, "0000003f")},
		{"short taken", taken, make([]byte, 3)},
		{"long taken", taken, make([]byte, 5)},
		{"short end", end, make([]byte, 3)},
		{"end without reason", end, make([]byte, 4)},
		{"end with unknown reason", end, unhex("03000000")},
		{"end with rest", end, unhex("01000001")},
		{"short refusal", refused, make([]byte, refusedHead-1)},
		{"long refusal", refused, append(unhex("02"), make([]byte, refusedHead+maxText)...)},
		{"refusal without code", refused, make([]byte, refusedHead)},
		{"lacks nothing", refused, unhex("07000000" + "00000000" + "0000000000000000")},
		{"lacks what is unknown", refused, unhex("07000000" + "00000000" + "0800000000000000")},
		{"lacks with a limit", refused, unhex("07000000" + "00000000" + "0100000001000000")},
		{"refusal with unknown code", refused, unhex("08000000" + "000000000000000000000000")},
		{"refusal with more than a code", refused, unhex("02000100" + "000000000000000000000000")},
		{"refusal that comes again", refused, unhex("02000000" + "01000000" + "0000000000000000")},
		{"refusal for a year", refused, unhex("04000000" + "ffffffff" + "0000000000000000")},
		{"too long without figures", refused, unhex("05000000" + "00000000" + "0000000000000000")},
		{"too long without limit", refused, unhex("05000000" + "00000000" + "0100000000000000")},
		{"prompt of a library", refused, unhex("05000000" + "00000000" + "01001000" + "01000000")},
		{"limit of two libraries", refused, unhex("05000000" + "00000000" + "01000000" + "ffffffff")},
		{"busy with figures", refused, unhex("04000000" + "00000000" + "0100000001000000")},
		{"refusal in no language", refused, unhex("02000000" + "000000000000000000000000" + "ff")},
	} {
		if err := tt.decode(tt.b); err == nil {
			t.Errorf("%s was read", tt.name)
		}
	}
	r, err := decodeRefusal(append(unhex("02000000000000000000000000000000"), "a\x1b[2Jb\nc"...))
	if err != nil || r.text != "a [2Jb c" {
		t.Errorf("text for a terminal: %q, %v", r.text, err)
	}
	long := putRefusal(nil, &refusal{code: CodeFailed, text: strings.Repeat("é", maxText)})
	if r, err := decodeRefusal(long); err != nil || len(r.text) != maxText {
		t.Errorf("text of %d bytes, %v", len(r.text), err)
	}
	quoted := putRefusal(nil, &refusal{code: CodeFailed, text: "key \xff is not known"})
	if r, err := decodeRefusal(quoted); err != nil || r.text != "key  is not known" {
		t.Errorf("text that quotes what is no text: %q, %v", r.text, err)
	}
}

func FuzzAsk(f *testing.F) {
	f.Add(encodeAsk(f, sampleRequest(), sampleExtra()))
	f.Add(encodeAsk(f, gateway.Request{Prompt: []int32{1}}, gateway.Extra{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAsk(b)
		if err != nil {
			return
		}
		if again, err := a.encode(); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x is read, and written as %x, %v", b, again, err)
		}
	})
}

func FuzzSmallFrames(f *testing.F) {
	f.Add(putAnswer(nil, 1, 2, 3))
	f.Add(putLikely(nil, sampleLikely()))
	f.Add(putRefusal(nil, &refusal{code: CodeLacks, lacks: gateway.Abilities{Special: true}}))
	f.Add(putEnd("stop"))
	f.Add(putRefusal(nil, &refusal{code: CodeBusy, retry: time.Second, text: "busy"}))
	f.Add(putRefusal(nil, &refusal{code: CodeLong, prompt: 9, limit: 8}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if cached, list, err := decodeAnswer(b, 0); err == nil && !bytes.Equal(putAnswer(nil, cached, list...), b) {
			t.Fatalf("tokens %x are read as %d, %v", b, cached, list)
		}
		if l, err := decodeLikely(b, 0); err == nil && !bytes.Equal(putLikely(nil, &l), b) {
			t.Fatalf("likely %x is read as %+v", b, l)
		}
		if finish, err := decodeEnd(b); err == nil && !bytes.Equal(putEnd(finish), b) {
			t.Fatalf("end %x is read as %q", b, finish)
		}
		if r, err := decodeRefusal(b); err == nil && !bytes.Equal(putRefusal(nil, r)[:refusedHead], b[:refusedHead]) {
			t.Fatalf("refusal %x is read as %+v", b, r)
		}
		if v, err := decodeVector(b); err == nil && !bytes.Equal(putVector(nil, v), b) {
			t.Fatalf("vector %x is read as %v", b, v)
		}
		if n, err := decodeTaken(b); err == nil && !bytes.Equal(p2p.AppendInts(nil, []int32{int32(n)}), b) {
			t.Fatalf("taken %x is read as %d", b, n)
		}
	})
}
