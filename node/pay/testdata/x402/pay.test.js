// The x402 client as its package has it, against a paying door. desk_test.go starts the
// door and a chain, and looks at the vault afterwards.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createKeyPairSignerFromPrivateKeyBytes } from '@solana/kit'
import { decodePaymentResponseHeader, wrapFetchWithPayment, x402Client } from '@x402/fetch'
import { ExactSvmScheme } from '@x402/svm/exact/client'

const { KVASIR_URL: url, KVASIR_RPC: rpcUrl, KVASIR_MINT: asset, KVASIR_SEED: seed, KVASIR_POOR: poor } = process.env
const network = 'solana:EtWTRABZaYq6iMfeYKouRu166VU2xqa1'

// The client pays with tokens that it knows, or that its user allows.
async function payer (hex, send = fetch) {
  const signer = await createKeyPairSignerFromPrivateKeyBytes(Buffer.from(hex, 'hex'))
  const client = x402Client.fromConfig({
    schemes: [{ network, client: new ExactSvmScheme(signer, { rpcUrl }) }],
    spendControls: { allowedAssets: [{ network, asset, maxAmountPerPayment: '15000' }] }
  })
  return { signer, fetch: wrapFetchWithPayment(send, client) }
}

const ask = (more) => ({
  method: 'POST',
  headers: { 'Content-Type': 'application/json' },
  body: JSON.stringify({ model: 'm', prompt: 'hello', max_tokens: 10, ...more })
})

test('an answer is paid and comes', async () => {
  const { signer, fetch } = await payer(seed)
  const response = await fetch(`${url}/v1/completions`, ask())
  const answer = await response.json()
  assert.equal(response.status, 200, JSON.stringify(answer))
  assert.equal(answer.choices[0].text, 'xxxx')
  const paid = decodePaymentResponseHeader(response.headers.get('PAYMENT-RESPONSE'))
  assert.equal(paid.success, true)
  assert.equal(paid.payer, signer.address)
  assert.match(paid.transaction, /^[1-9A-HJ-NP-Za-km-z]{86,88}$/)
})

test('a stream is paid and comes', async () => {
  const { fetch } = await payer(seed)
  const response = await fetch(`${url}/v1/completions`, ask({ stream: true }))
  const text = await response.text()
  assert.equal(response.status, 200, text)
  assert.equal([...text.matchAll(/"text":"(x+)"/g)].map((m) => m[1]).join(''), 'xxxx')
  assert.match(text, /data: \[DONE\]\n\n$/)
})

test('a wallet without tokens gets no answer', async () => {
  const { fetch } = await payer(poor)
  const response = await fetch(`${url}/v1/completions`, ask({ prompt: 'world' }))
  assert.equal(response.status, 402)
  const paid = decodePaymentResponseHeader(response.headers.get('PAYMENT-RESPONSE'))
  assert.equal(paid.success, false)
  assert.ok(paid.errorReason)
})

test('one payment is for one answer', async () => {
  let sent
  const recording = async (request) => {
    if (request.headers.has('PAYMENT-SIGNATURE')) sent = request.headers.get('PAYMENT-SIGNATURE')
    return await globalThis.fetch(request)
  }
  const { fetch } = await payer(seed, recording)
  const first = await fetch(`${url}/v1/completions`, ask({ prompt: 'once!' }))
  assert.equal(first.status, 200, await first.text())
  const again = ask({ prompt: 'once!' })
  again.headers['PAYMENT-SIGNATURE'] = sent
  for (let n = 0; n < 100; n++) { // until the first is reported
    const second = await globalThis.fetch(`${url}/v1/completions`, again)
    if (second.status !== 503) {
      assert.equal(second.status, 409, await second.text())
      break
    }
    await second.text()
  }
  const other = ask({ prompt: 'twice' })
  other.headers['PAYMENT-SIGNATURE'] = sent
  assert.equal((await globalThis.fetch(`${url}/v1/completions`, other)).status, 409)
})
