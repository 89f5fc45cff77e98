package p2p

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"
)

var (
	encMode = must(cbor.CoreDetEncOptions().EncMode())
	decMode = must(strict(8, maxModels, 64).DecMode())
)

// strict are the options of decoders that take memory within these limits only.
func strict(levels, elements, pairs int) cbor.DecOptions {
	return cbor.DecOptions{
		DupMapKey:        cbor.DupMapKeyEnforcedAPF,
		IndefLength:      cbor.IndefLengthForbidden,
		TagsMd:           cbor.TagsForbidden,
		MaxNestedLevels:  levels,
		MaxArrayElements: elements,
		MaxMapPairs:      pairs,
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// ControlCodec returns what encodes and decodes the control records of a protocol:
// deterministic CBOR of so many bytes at most, four levels deep, in which an array has
// so many elements and a map so many pairs at most. Encode panics for what is no record.
// Decode refuses unknown keys and any other encoding of the same value.
func ControlCodec(size, elements, pairs int) (encode func(v any) []byte, decode func(payload []byte, v any) error) {
	options := strict(4, elements, pairs)
	options.ExtraReturnErrors = cbor.ExtraDecErrorUnknownField
	dec := must(options.DecMode())
	encode = func(v any) []byte { return must(encMode.Marshal(v)) }
	decode = func(payload []byte, v any) error {
		if len(payload) > size {
			return fmt.Errorf("%d bytes of control record, at most %d", len(payload), size)
		}
		if err := dec.Unmarshal(payload, v); err != nil {
			return err
		}
		if again, err := encMode.Marshal(v); err != nil || !bytes.Equal(again, payload) {
			return errors.New("control record is not in its deterministic encoding")
		}
		return nil
	}
	return encode, decode
}
