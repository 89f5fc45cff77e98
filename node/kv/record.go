package kv

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Keys in badger, N being the name of the space, numbers big endian:
//
//	N 0x00 'c' serial(8) part(4)   part of a value: maxPart bytes, the last one the rest
//	N 0x00 'h' key                 head of a value: see head
//
// A value is its head: parts are written before, and removed after it. The serial
// is new with every value, so that parts are never written twice.
const (
	tagPart = 'c'
	tagHead = 'h'

	maxPart = 64 << 10 // see options
	maxKey  = 512
)

// head describes a value. Format 1, 33 bytes, numbers big endian, nothing after:
// format(1) serial(8) when it was put, ms since 1970 (8) bytes of the value(8)
// CRC-32C of key and value(4) and of all that is before(4) of the head.
type head struct {
	serial uint64
	at     int64 // Unix milliseconds
	size   int64
	sum    uint32
}

const (
	headFormat = 1
	headBytes  = 33
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum is over key and value, so that no value is given out for another key.
func checksum(key string, value []byte) uint32 {
	return crc32.Update(crc32.Checksum([]byte(key), castagnoli), castagnoli, value)
}

func (h head) encode() []byte {
	b := append(make([]byte, 0, headBytes), headFormat)
	b = binary.BigEndian.AppendUint64(b, h.serial)
	b = binary.BigEndian.AppendUint64(b, uint64(h.at))
	b = binary.BigEndian.AppendUint64(b, uint64(h.size))
	b = binary.BigEndian.AppendUint32(b, h.sum)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func decodeHead(b []byte) (head, error) {
	if len(b) != headBytes {
		return head{}, fmt.Errorf("a head of %d bytes, want %d", len(b), headBytes)
	}
	if b[0] != headFormat {
		return head{}, fmt.Errorf("a head of format %d, want %d", b[0], headFormat)
	}
	if crc32.Checksum(b[:headBytes-4], castagnoli) != binary.BigEndian.Uint32(b[headBytes-4:]) {
		return head{}, fmt.Errorf("a head with a wrong checksum")
	}
	h := head{
		serial: binary.BigEndian.Uint64(b[1:]), at: int64(binary.BigEndian.Uint64(b[9:])),
		size: int64(binary.BigEndian.Uint64(b[17:])), sum: binary.BigEndian.Uint32(b[25:]),
	}
	if h.size < 0 || h.at < 0 {
		return head{}, fmt.Errorf("a head with a negative size or time")
	}
	return h, nil
}

// parts is how many parts a value of that size has.
func (h head) parts() int64 { return (h.size + maxPart - 1) / maxPart }

func (s *Space) headKey(key string) []byte {
	return append(append([]byte(s.name), 0, tagHead), key...)
}

func (s *Space) partKey(serial uint64, part int64) []byte {
	b := binary.BigEndian.AppendUint64(append([]byte(s.name), 0, tagPart), serial)
	return binary.BigEndian.AppendUint32(b, uint32(part))
}

// parsePart reads what follows the tag of a part's key.
func parsePart(rest []byte) (serial uint64, part uint32, ok bool) {
	if len(rest) != 12 {
		return 0, 0, false
	}
	return binary.BigEndian.Uint64(rest), binary.BigEndian.Uint32(rest[8:]), true
}
